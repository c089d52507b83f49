"""`tocsin convert`: from a configuration of SageMaker Debugger."""
