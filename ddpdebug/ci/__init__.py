"""The verdict of a check, and outputs for CI jobs: JUnit, annotations, golden runs, equivalence."""
