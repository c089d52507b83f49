"""Amazon SageMaker: training jobs, by exact name."""
