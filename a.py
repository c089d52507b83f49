import os, sys, threading, time, torch
from tocsin.emitter import start
run = start("r1", services=False)
try: run.record("x", torch.ones(3, dtype=torch.bfloat16)); print("bf16 ok")
except Exception as e: print("bf16", type(e).__name__, e)
try: run.log({"a": torch.ones(2)})
except Exception as e: print("log", type(e).__name__, e)
try: run.log({"a": 10**400})
except Exception as e: print("log", type(e).__name__, e)
run.log({"a": 1.0})
# fork with the sender's lock held
s = run._session.training.sender if run._session.training else None
print("sender", s)
run.finish()
for i in range(1200):
    r = start(f"r{i}", services=False); r.finish()
raise ValueError("user's own")
