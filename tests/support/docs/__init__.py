"""What tests of the documentation share."""
