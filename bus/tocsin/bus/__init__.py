"""The bus: moves records between processes, on one SQLite file or on Kafka."""
