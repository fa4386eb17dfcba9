// hiprtc, as CuPy calls it: programs and their results. Compiling is done in Python (hiprtc.py), by the clang of ziglang.
#include <stdlib.h>

#include "../runtime/types.h"

#define PUBLIC extern "C" __attribute__((visibility("default")))

enum Result { SUCCESS = 0, OUT_OF_MEMORY = 1, INVALID_INPUT = 3, INVALID_PROGRAM = 4, COMPILATION = 6, NAME_NOT_VALID = 10 };

struct Text {  // its own bytes, and a zero behind them
  char* bytes;
  u64 size;
  void set(const char* from, u64 n) {
    free(bytes);
    bytes = (char*)malloc(n + 1);
    memcpy(bytes, from, n);
    bytes[n] = 0;
    size = n;
  }
  void set(const char* from) { set(from, strlen(from)); }
  void copy_to(char* to, bool with_zero) const {
    if (bytes) memcpy(to, bytes, size + with_zero);
    else if (with_zero) *to = 0;
  }
};
constexpr u32 MOST = 256;  // headers, and names asked for
struct Program {
  Text source, log, code, headers[MOST], header_names[MOST], names[MOST], lowered[MOST];  // all texts, one after the other
  u32 header_count, name_count;
};

// Compiles the program with these options and calls the setters below; 0, or a Result.
using Compiler = int (*)(Program*, int count, const char** options);
static Compiler compiler;
PUBLIC void kosmos_rtc_set_compiler(Compiler given) { compiler = given; }
PUBLIC const char* kosmos_rtc_source(const Program* p) { return p->source.bytes; }
PUBLIC const char* kosmos_rtc_header(const Program* p, u32 i, const char** name) {
  if (i >= p->header_count) return nullptr;
  *name = p->header_names[i].bytes;
  return p->headers[i].bytes;
}
PUBLIC const char* kosmos_rtc_name(const Program* p, u32 i) { return i < p->name_count ? p->names[i].bytes : nullptr; }
PUBLIC void kosmos_rtc_set_code(Program* p, const char* code, u64 size) { p->code.set(code, size); }
PUBLIC void kosmos_rtc_set_log(Program* p, const char* log) { p->log.set(log); }
PUBLIC void kosmos_rtc_set_lowered(Program* p, u32 i, const char* lowered) { p->lowered[i].set(lowered); }

PUBLIC const char* hiprtcGetErrorString(int e) {
  switch (e) {
    case SUCCESS: return "HIPRTC_SUCCESS";
    case OUT_OF_MEMORY: return "HIPRTC_ERROR_OUT_OF_MEMORY";
    case INVALID_INPUT: return "HIPRTC_ERROR_INVALID_INPUT";
    case COMPILATION: return "HIPRTC_ERROR_COMPILATION";
    case NAME_NOT_VALID: return "HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
    default: return "HIPRTC_ERROR";
  }
}
PUBLIC int hiprtcVersion(int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return SUCCESS;
}
PUBLIC int hiprtcCreateProgram(Program** to, const char* source, const char*, int count, const char** headers,
                               const char** names) {
  if (!to || !source || count < 0 || count > (int)MOST) return INVALID_INPUT;
  Program* p = *to = (Program*)calloc(1, sizeof *p);
  p->source.set(source);
  for (; p->header_count < (u32)count; p->header_count++) {
    p->headers[p->header_count].set(headers[p->header_count]);
    p->header_names[p->header_count].set(names[p->header_count]);
  }
  return SUCCESS;
}
PUBLIC int hiprtcDestroyProgram(Program** program) {
  Program* p = *program;
  for (Text* t = &p->source; t < p->lowered + MOST; t++) free(t->bytes);
  free(p);
  *program = nullptr;
  return SUCCESS;
}
PUBLIC int hiprtcAddNameExpression(Program* p, const char* name) {
  if (p->name_count == MOST) return OUT_OF_MEMORY;
  p->names[p->name_count++].set(name);
  return SUCCESS;
}
PUBLIC int hiprtcCompileProgram(Program* p, int count, const char** options) {
  return compiler ? compiler(p, count, options) : INVALID_PROGRAM;
}
PUBLIC int hiprtcGetLoweredName(const Program* p, const char* name, const char** lowered) {
  for (u32 i = 0; i < p->name_count; i++) {
    if (strcmp(p->names[i].bytes, name) || !p->lowered[i].bytes) continue;
    *lowered = p->lowered[i].bytes;
    return SUCCESS;
  }
  return NAME_NOT_VALID;
}
PUBLIC int hiprtcGetProgramLogSize(const Program* p, size_t* size) {
  *size = p->log.size + 1;
  return SUCCESS;
}
PUBLIC int hiprtcGetProgramLog(const Program* p, char* to) {
  p->log.copy_to(to, true);
  return SUCCESS;
}
PUBLIC int hiprtcGetCodeSize(const Program* p, size_t* size) {
  *size = p->code.size;
  return SUCCESS;
}
PUBLIC int hiprtcGetCode(const Program* p, char* to) {
  p->code.copy_to(to, false);
  return SUCCESS;
}
PUBLIC int hiprtcGetBitcodeSize(const Program*, size_t*) { return INVALID_PROGRAM; }
PUBLIC int hiprtcGetBitcode(const Program*, char*) { return INVALID_PROGRAM; }
