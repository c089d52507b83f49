"""AWS CloudWatch: each issue as a log event that is also a metric, for alarms."""
