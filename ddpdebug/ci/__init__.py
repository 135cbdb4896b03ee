"""The verdict of a check and what CI jobs are given: JUnit, annotations, golden runs, equivalence."""
