"""`tocsin mcp`: what an agent may ask of runs. It reads; nothing here stops or changes anything."""
