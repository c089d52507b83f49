"""Kubernetes: Jobs, JobSets and training jobs of Kubeflow, ended through the API server."""
