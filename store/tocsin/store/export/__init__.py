"""Runs in other people's formats: TensorBoard, CSV, Parquet, JSON lines, MLflow."""
