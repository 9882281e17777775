# The wheel's own API on the bytes that the bench moves. "receive" offers memory and waits; "send" takes a line per round.
# Arguments: role, bytes, libraries to load first.
import ctypes, mmap, os, sys, time

for path in sys.argv[3:]:
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
from mooncake.engine import TransferEngine

role, size = sys.argv[1], int(sys.argv[2])
shared = os.memfd_create("bench")
os.ftruncate(shared, size)
memory = mmap.mmap(shared, size)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ctypes.memset(address, 1, size)
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.batch_register_memory([address], [size]) == 0
print("@", engine.get_rpc_port(), address, flush=True)
for line in sys.stdin:
    port, target, count, mode = line.split()
    session, target, count = f"127.0.0.1:{port}", int(target), int(count)
    length = size // count
    sources = [address + at * length for at in range(count)]
    # Backwards, so that no two are neighbours on both sides.
    targets = [target + (count - 1 - at) * length for at in range(count)]
    lengths = [length] * count
    start = time.perf_counter()
    if mode == "sync":
        assert engine.batch_transfer_sync_write(session, sources, targets, lengths) == 0
    else:
        waiting = [
            engine.batch_transfer_async_write(session, [s], [t], [n]) for s, t, n in zip(sources, targets, lengths)
        ]
        for batch in waiting:
            while (state := engine.transfer_check_status(batch)) == 0:
                pass
            assert state == 1
    print("@", time.perf_counter() - start, flush=True)
os._exit(0)
