import os, threading, time, signal
from tocsin.emitter import start
run = start("r1", services=False)
run.log({"loss": 1.0})
s = run._session.training.sender
s._lock.acquire()
pid = os.fork()
if pid == 0:
    signal.alarm(3)
    run.log({"loss": 2.0})
    os._exit(0)
s._lock.release()
print("child", os.waitpid(pid, 0)[1])
run.finish()
