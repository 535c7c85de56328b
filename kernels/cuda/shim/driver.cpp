// A driver's library whose only device is the CPU: the calls that `GpuDriver` makes, so that its own code is tested as
// it is, in a process that finds this library under the driver's name.
//
// Everything happens at once. Calls without a current context, copies outside of memory, and memory that is not given
// back are refused as a driver refuses them, or stop the program. `FAKE_CUDA` in the environment makes it fail: words are
// `version=N`, `devices=N`, `capability=N` (90 is 9.0), `memory=N`, `lost=N` (after N launches) and `old-ptx`.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

typedef int Result;
typedef uint64_t Address;

extern "C" int shim_launch(const char* name, const uint32_t* grid, uint32_t threads, void** args, const char* kinds,
                           uint32_t order, char* problem, size_t size);
extern "C" const char* shim_kernel(uint32_t index);

namespace {

const Result SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NO_DEVICE = 100,
             INVALID_CONTEXT = 201, UNSUPPORTED_PTX = 222, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700;

std::mutex lock;
std::map<Address, size_t> memory;
size_t taken = 0;
long launches = 0, retained = 0;
char context;
thread_local void* current = nullptr;

// The number that `FAKE_CUDA` gives a word, or another.
long told(const char* word, long otherwise) {
    const char* all = getenv("FAKE_CUDA");
    const char* found = all ? strstr(all, word) : nullptr;
    return found ? atol(found + strlen(word)) : otherwise;
}

// Whether work may be done.
Result state() {
    if (current != &context) {
        return INVALID_CONTEXT;
    }
    return launches > told("lost=", 1l << 40) ? ILLEGAL_ADDRESS : SUCCESS;
}

bool inside(Address start, size_t bytes) {
    auto next = memory.upper_bound(start);
    if (next == memory.begin()) {
        return false;
    }
    auto found = std::prev(next);
    return start + bytes <= found->first + found->second;
}

Result take(Address* out, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    if (Result result = state()) {
        return result;
    }
    if (taken + bytes > (size_t)told("memory=", 1l << 40)) {
        return OUT_OF_MEMORY;
    }
    void* start = nullptr;
    if (bytes == 0 || posix_memalign(&start, 256, bytes)) {
        return INVALID_VALUE;
    }
    memset(start, 0xff, bytes);
    taken += bytes;
    memory[(Address)start] = bytes;
    *out = (Address)start;
    return SUCCESS;
}

Result give_back(Address start) {
    std::lock_guard<std::mutex> held(lock);
    auto found = memory.find(start);
    if (found == memory.end()) {
        return INVALID_VALUE;
    }
    taken -= found->second;
    free((void*)start);
    memory.erase(found);
    return SUCCESS;
}

Result copy(Address to, Address from, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    if (Result result = state()) {
        return result;
    }
    if (!inside(to, bytes) || !inside(from, bytes)) {
        return INVALID_VALUE;
    }
    memcpy((void*)to, (void*)from, bytes);
    return SUCCESS;
}

}  // namespace

extern "C" {

Result cuInit(unsigned) { return told("devices=", 1) == 0 ? NO_DEVICE : SUCCESS; }
Result cuDriverGetVersion(int* version) { return *version = (int)told("version=", 12080), SUCCESS; }
Result cuDeviceGetCount(int* count) { return *count = (int)told("devices=", 1), SUCCESS; }
Result cuDeviceGet(int* device, int ordinal) {
    return *device = ordinal, ordinal < told("devices=", 1) ? SUCCESS : INVALID_DEVICE;
}
Result cuDeviceGetAttribute(int* value, int attribute, int) {
    // Major and minor capability.
    long capability = told("capability=", 90);
    *value = (int)(attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 0);
    return SUCCESS;
}
Result cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "fake"), SUCCESS; }
Result cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 1 << 30, SUCCESS; }
Result cuMemGetInfo_v2(size_t* left, size_t* bytes) {
    std::lock_guard<std::mutex> held(lock);
    *bytes = (size_t)told("memory=", 1l << 40);
    return *left = *bytes - taken, state();
}
Result cuDevicePrimaryCtxRetain(void** out, int) {
    std::lock_guard<std::mutex> held(lock);
    return retained++, *out = &context, SUCCESS;
}
Result cuDevicePrimaryCtxRelease_v2(int) {
    std::lock_guard<std::mutex> held(lock);
    if (--retained == 0 && !memory.empty()) {
        fprintf(stderr, "%zu pieces of memory are not given back\n", memory.size());
        abort();
    }
    return SUCCESS;
}
Result cuCtxSetCurrent(void* to) { return current = to, SUCCESS; }

Result cuMemAlloc_v2(Address* out, size_t bytes) { return take(out, bytes); }
Result cuMemHostAlloc(void** out, size_t bytes, unsigned) { return take((Address*)out, bytes); }
Result cuMemFree_v2(Address start) { return give_back(start); }
Result cuMemFreeHost(void* start) { return give_back((Address)start); }
Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void*) { return copy(to, (Address)from, bytes); }
Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void*) { return copy((Address)to, from, bytes); }
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void*) { return copy(to, from, bytes); }
Result cuMemsetD8Async(Address to, unsigned char byte, size_t bytes, void*) {
    std::lock_guard<std::mutex> held(lock);
    if (Result result = state()) {
        return result;
    }
    return inside(to, bytes) ? memset((void*)to, byte, bytes), SUCCESS : INVALID_VALUE;
}

Result cuStreamCreate(void** out, unsigned) { return *out = new char, state(); }
Result cuStreamDestroy_v2(void* stream) { return delete (char*)stream, SUCCESS; }
Result cuStreamSynchronize(void*) { return state(); }
Result cuStreamWaitEvent(void*, void*, unsigned) { return state(); }
Result cuEventCreate(void** out, unsigned) { return *out = new char, state(); }
Result cuEventDestroy_v2(void* event) { return delete (char*)event, SUCCESS; }
Result cuEventRecord(void*, void*) { return state(); }
Result cuEventSynchronize(void*) { return state(); }

Result cuModuleLoadData(void** out, const void*) {
    *out = &context;
    return getenv("FAKE_CUDA") && strstr(getenv("FAKE_CUDA"), "old-ptx") ? UNSUPPORTED_PTX : state();
}
Result cuModuleGetFunction(void** out, void*, const char* name) {
    for (uint32_t i = 0; shim_kernel(i); i++) {
        if (!strcmp(shim_kernel(i), name)) {
            return *out = (void*)shim_kernel(i), SUCCESS;
        }
    }
    return NOT_FOUND;
}
Result cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned,
                      void*, void** args, void**) {
    std::lock_guard<std::mutex> held(lock);
    launches++;
    if (Result result = state()) {
        return result;
    }
    const uint32_t grid[3] = {x, y, z};
    char problem[320];
    // What kinds the arguments are a driver does not know.
    if (shim_launch((const char*)function, grid, threads, args, nullptr, 0, problem, sizeof problem)) {
        fprintf(stderr, "%s\n", problem);
        return INVALID_VALUE;
    }
    return SUCCESS;
}

Result cuGetErrorName(Result result, const char** out) {
    switch (result) {
        case OUT_OF_MEMORY: *out = "CUDA_ERROR_OUT_OF_MEMORY"; return SUCCESS;
        case ILLEGAL_ADDRESS: *out = "CUDA_ERROR_ILLEGAL_ADDRESS"; return SUCCESS;
        case UNSUPPORTED_PTX: *out = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"; return SUCCESS;
        default: *out = "another error"; return SUCCESS;
    }
}
Result cuGetErrorString(Result result, const char** out) { return cuGetErrorName(result, out); }

}  // extern "C"
