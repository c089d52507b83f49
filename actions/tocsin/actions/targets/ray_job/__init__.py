"""Ray: jobs that were submitted to a cluster, by submission id. Not `ray`: that is the library."""
