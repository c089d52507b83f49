"""AWS Batch: jobs and children of array jobs, by id and attempt."""
