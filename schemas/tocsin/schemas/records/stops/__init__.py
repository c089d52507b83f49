"""Records about stops: commands and answers, people's decisions, and how far a stop has come."""
