"""A real Kubernetes for the tests: API server, controllers and etcd, from their Go modules."""
