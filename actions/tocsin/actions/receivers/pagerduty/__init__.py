"""PagerDuty: alerts that are triggered and resolved, through the Events API v2."""
