"""E-mail: text, HTML with a plot, and the last values, to an SMTP server."""
