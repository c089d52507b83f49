"""The configuration file: read with positions, validated, with a message for each problem."""
