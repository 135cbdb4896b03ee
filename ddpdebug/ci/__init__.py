"""The verdict of a check and what CI jobs are told: JUnit, annotations, golden runs, equivalence."""
