# Says, in one line of JSON, what this interpreter is and whether Mooncake can be imported in it. Arguments are libraries to
# load first.
import ctypes, glob, importlib, importlib.metadata, json, os, sys, sysconfig

preloaded, failed = [], []


def load(path, must):
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        preloaded.append(path)
    except OSError as error:
        if must:
            failed.append(str(error))


for path in sys.argv[1:]:
    load(path, True)
packages = sysconfig.get_paths()["platlib"]
# The wheel for CUDA counts on torch having loaded this.
for path in glob.glob(os.path.join(packages, "nvidia", "cuda_runtime", "lib", "libcudart.so.12")):
    load(path, False)
found = {}
for name in ("engine", "store"):
    try:
        module = importlib.import_module("mooncake." + name)
        found[name] = {"path": module.__file__}
    except BaseException as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"}
wheel = None
for name in (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-npu",
):
    try:
        wheel = {"name": name, "version": importlib.metadata.version(name)}
    except importlib.metadata.PackageNotFoundError:
        pass
get = sysconfig.get_config_var
answer = {
    "version": list(sys.version_info[:3]),
    "executable": sys.executable,
    "prefix": sys.base_prefix,
    "libdir": get("LIBDIR"),
    "soname": get("INSTSONAME"),
    "multiarch": get("MULTIARCH"),
    "packages": packages,
    "preloaded": preloaded,
    "failed": failed,
    "wheel": wheel,
    **found,
}
print("\n" + json.dumps(answer), flush=True)
os._exit(0)
