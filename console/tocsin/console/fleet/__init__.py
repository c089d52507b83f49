"""Tools for those who run the workers of a fleet: quarantined rules, dumps of a bus."""
