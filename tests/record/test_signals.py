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


def run(body: str) -> subprocess.CompletedProcess:
  return subprocess.run([sys.executable, "-W", "ignore", "-c", HEAD + textwrap.dedent(body)],
                        capture_output=True, text=True, timeout=300)


def prints(body: str, expected: str, status: int = 0) -> None:
  result = run(body)
  assert (result.stdout.split(), result.returncode) == (expected.split(), status), result.stderr


def test_default_is_held_back_and_then_raised_again():
  prints("""
    watch.install()
    term()
    print(watch.mode, watch.received, receive.recv(9)[0], flush=True)
    watch.raise_again()
    time.sleep(50)
    """, "default True 15", -signal.SIGTERM)


def test_default_is_back_after_restore():
  prints("""
    watch.install(); watch.restore()
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1), flush=True)
    term()
    time.sleep(50)
    """, "True -1", -signal.SIGTERM)


def test_a_python_handler_is_called_and_comes_back():
  prints("""
    def mine(number, frame): print("mine", number)
    signal.signal(signal.SIGTERM, mine)
    watch.install()
    term()
    print(watch.mode, watch.raises_again)
    watch.restore()
    print(signal.getsignal(signal.SIGTERM) is mine)
    """, "mine 15 python False True")


def test_ignored_stays_ignored():
  prints("""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch.install()
    term()
    print(watch.mode, watch.received, watch.raises_again)
    watch.restore()
    term()
    """, "ignored True False")


NATIVE = """
    calls = []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = kind(lambda number: calls.append(number))
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    address = ctypes.cast(handler, ctypes.c_void_p).value
    libc.signal(15, address)
"""


def test_a_c_handler_is_told_once_and_comes_back():
  prints(NATIVE + """
    watch.install()
    term(); term()
    watch.tell_native()
    print(watch.mode, watch.raises_again, calls)
    watch.restore()
    print(libc.signal(15, 0) == address)
    """, "native False [15] True")


def test_a_c_handler_laid_over_a_python_one_is_the_one_that_counts():
  """So does jax.distributed.initialize: Python's own table does not know."""
  prints("signal.signal(signal.SIGTERM, lambda *_: print('never'))" + textwrap.dedent(NATIVE) + textwrap.dedent("""
    watch.install()
    term()
    print(watch.mode, calls)
    """), "native [15]")  # noqa: E501


def test_a_handler_put_in_its_place_is_what_counts():
  prints("""
    watch.install()
    print(watch.raises_again)
    signal.signal(signal.SIGTERM, lambda *_: print("mine"))
    term()
    print(watch.raises_again)
    """, "True mine False")


def test_where_nobody_listens_any_more_the_signal_takes_its_course():
  prints("""
    watch = Termination(wake, listens=lambda: False)
    watch.install()
    term()
    time.sleep(50)
    """, "", -signal.SIGTERM)


def test_another_thread_has_the_main_one_install_it():
  prints("""
    import threading
    from jaxpace.record.signals import in_main_thread
    threading.Thread(target=in_main_thread, args=(watch.install,)).start()
    while watch.mode == "off":
      time.sleep(0.01)
    print(watch.mode)
    """, "default")


def test_the_writer_hears_of_it_while_the_main_thread_is_in_c():
  prints("""
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
    """, "1 b'\\x0f'")


def test_someone_elses_wakeup_descriptor_is_left_to_them():
  prints("""
    theirs = socket.socketpair()
    theirs[1].setblocking(False)
    signal.set_wakeup_fd(theirs[1].fileno())
    watch.install()
    term()
    print(theirs[0].recv(9), receive.recv(9))
    watch.restore()
    print(signal.set_wakeup_fd(-1) == theirs[1].fileno())
    """, "b'\\x0f' b'\\x0f' True")


def test_a_handler_installed_later_is_not_taken_away():
  prints("""
    watch.install()
    def later(*_): pass
    signal.signal(signal.SIGTERM, later)
    watch.restore()
    print(signal.getsignal(signal.SIGTERM) is later)
    """, "True")


def test_a_forked_child_dies_of_its_own_signal_and_the_parent_hears_nothing():
  prints("""
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
    """, "-15 False quiet")


@pytest.mark.parametrize("body", ["watch.install()", "print(watch.mode); watch.restore()"])
def test_outside_the_main_thread_nothing_is_touched(body):
  prints(f"""
    import threading
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: ({body.replace(";", ",")}))
    thread.start(); thread.join()
    print(signal.getsignal(signal.SIGTERM) == before, watch.mode)
    """, ("off " if "print" in body else "") + "True off")
