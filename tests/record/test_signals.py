"""What SIGTERM does before, while and after the recorder watches it; each case in a process of its
own."""

import signal
import subprocess
import sys
import textwrap

import pytest

HEAD = """
import ctypes, os, signal, socket, sys, time
from jaxpace.record.signals import Termination
receive, wake = socket.socketpair()
wake.setblocking(False)
receive.settimeout(50)
watch = Termination(wake)
def term(): os.kill(os.getpid(), signal.SIGTERM)
"""
NATIVE = """
    calls = []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = kind(lambda number: calls.append(number))
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    address = ctypes.cast(handler, ctypes.c_void_p).value
    libc.signal(15, address)
"""
CASES = {
    "default is held back and then raised again": ("""
    watch.install()
    term()
    print(watch.mode, watch.received, receive.recv(9)[0], flush=True)
    watch.raise_again()
    time.sleep(50)
    """, "default True 15", -signal.SIGTERM),
    "default is back after restore": ("""
    watch.install(); watch.restore()
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1), flush=True)
    term()
    time.sleep(50)
    """, "True -1", -signal.SIGTERM),
    "a python handler is called and comes back": ("""
    def mine(number, frame): print("mine", number)
    signal.signal(signal.SIGTERM, mine)
    watch.install()
    term()
    print(watch.mode, watch.raises_again)
    watch.restore()
    print(signal.getsignal(signal.SIGTERM) is mine)
    """, "mine 15 python False True"),
    "ignored stays ignored": ("""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch.install()
    term()
    print(watch.mode, watch.received, watch.raises_again)
    watch.restore()
    term()
    """, "ignored True False"),
    "a c handler is told once and comes back": (NATIVE + """
    watch.install()
    term(); term()
    watch.tell_native()
    print(watch.mode, watch.raises_again, calls)
    watch.restore()
    print(libc.signal(15, 0) == address)
    """, "native False [15] True"),
    # So does jax.distributed.initialize: Python's own table does not know.
    "a c handler laid over a python one is the one that counts": ("""
    signal.signal(signal.SIGTERM, lambda *_: print("never"))""" + NATIVE + """
    watch.install()
    term()
    print(watch.mode, calls)
    """, "native [15]"),
    "a handler put in its place is what counts": ("""
    watch.install()
    print(watch.raises_again)
    signal.signal(signal.SIGTERM, lambda *_: print("mine"))
    term()
    print(watch.raises_again)
    """, "True mine False"),
    "where nobody listens any more the signal takes its course": ("""
    watch = Termination(wake, listens=lambda: False)
    watch.install()
    term()
    time.sleep(50)
    """, "", -signal.SIGTERM),
    "another thread has the main one install it": ("""
    import threading
    from jaxpace.record.signals import in_main_thread
    threading.Thread(target=in_main_thread, args=(watch.install,)).start()
    while watch.mode == "off":
      time.sleep(0.01)
    print(watch.mode)
    """, "default"),
    "the writer hears of it while the main thread is in c": ("""
    import threading
    watch.install()
    heard = []
    told, tell = os.pipe()
    def hear():
      heard.append(receive.recv(1))
      os.write(tell, b"x")
    threading.Thread(target=hear, daemon=True).start()
    threading.Timer(0.1, term).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it is not to wake this one
    # In C until the other thread has heard of it.
    print(ctypes.CDLL(None).read(told, ctypes.create_string_buffer(1), 1), heard[0])
    """, "1 b'\\x0f'"),
    "someone else's wakeup descriptor is left to them": ("""
    theirs = socket.socketpair()
    theirs[1].setblocking(False)
    signal.set_wakeup_fd(theirs[1].fileno())
    watch.install()
    term()
    print(theirs[0].recv(9), receive.recv(9))
    watch.restore()
    print(signal.set_wakeup_fd(-1) == theirs[1].fileno())
    """, "b'\\x0f' b'\\x0f' True"),
    "a handler installed later is not taken away": ("""
    watch.install()
    def later(*_): pass
    signal.signal(signal.SIGTERM, later)
    watch.restore()
    print(signal.getsignal(signal.SIGTERM) is later)
    """, "True"),
    "a forked child dies of its own signal and the parent hears nothing": ("""
    watch.install()
    ready, say = os.pipe()
    child = os.fork()
    if not child:
      os.write(say, b"x")
      time.sleep(50)
      os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), watch.received)
    receive.settimeout(0.2)
    try: print(receive.recv(9))
    except TimeoutError: print("quiet")
    """, "-15 False quiet"),
}
"""What runs, what it prints, and its exit status where that is another than 0."""


def prints(body: str, expected: str, status: int = 0) -> None:
  result = subprocess.run([sys.executable, "-W", "ignore", "-c", HEAD + textwrap.dedent(body)],
                          capture_output=True, text=True, timeout=300)
  assert (result.stdout.split(), result.returncode) == (expected.split(), status), result.stderr


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_in_a_process_of_its_own(case):
  prints(*case)


@pytest.mark.parametrize("body", ["watch.install()", "print(watch.mode); watch.restore()"])
def test_outside_the_main_thread_nothing_is_touched(body):
  prints(f"""
    import threading
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: ({body.replace(";", ",")}))
    thread.start(); thread.join()
    print(signal.getsignal(signal.SIGTERM) == before, watch.mode)
    """, ("off " if "print" in body else "") + "True off")
