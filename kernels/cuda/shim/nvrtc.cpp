// A run-time compiler's library that compiles nothing: its code is a text that the fake driver does not look at, because
// the kernels are in this very library. `FAKE_NVRTC` in the environment makes it fail: `broken`.
#include <cstdlib>
#include <cstring>
#include <string>

typedef int Result;

namespace {

const Result SUCCESS = 0, COMPILATION = 6;

struct Program {
    std::string code, log;
};

Result give(const std::string& text, char* out) {
    memcpy(out, text.c_str(), text.size() + 1);
    return SUCCESS;
}

}  // namespace

extern "C" {

Result nvrtcVersion(int* major, int* minor) { return *major = 12, *minor = 8, SUCCESS; }
Result nvrtcCreateProgram(Program** out, const char*, const char* name, int, const char* const*, const char* const*) {
    *out = new Program{std::string("// code of ") + name, ""};
    return SUCCESS;
}
Result nvrtcCompileProgram(Program* program, int, const char* const*) {
    const char* faults = getenv("FAKE_NVRTC");
    if (faults && strstr(faults, "broken")) {
        program->log = "add.cu(1): error: the test wants it so";
        return COMPILATION;
    }
    return SUCCESS;
}
Result nvrtcGetPTXSize(Program* program, size_t* bytes) { return *bytes = program->code.size() + 1, SUCCESS; }
Result nvrtcGetPTX(Program* program, char* out) { return give(program->code, out); }
Result nvrtcGetProgramLogSize(Program* program, size_t* bytes) { return *bytes = program->log.size() + 1, SUCCESS; }
Result nvrtcGetProgramLog(Program* program, char* out) { return give(program->log, out); }
Result nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, SUCCESS; }

}  // extern "C"
