"""AWS Lambda: an asynchronous call with the issue as a CloudEvent."""
