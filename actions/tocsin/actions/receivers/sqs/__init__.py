"""AWS SQS: a queue that gets each issue as a CloudEvent."""
