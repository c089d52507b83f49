"""Reading runs: from Parquet files, from frames of a live bus, and both as one."""
