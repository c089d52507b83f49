"""Parquet files, by DuckDB: tables of frames and events, written, merged and read."""
