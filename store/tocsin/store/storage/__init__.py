"""Where a store's files are: a folder of this machine, or a bucket."""
