"""The same bus on Apache Kafka."""
