// A stack of its own for each WG of the forced target. The only file of that target which knows the machine.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#if !defined(__x86_64__) || defined(KOSMOS_FORCED_UCONTEXT)
#include <ucontext.h>
#endif

namespace target {
constexpr size_t STACK_BYTES = 64 << 10;

#if defined(__x86_64__) && !defined(KOSMOS_FORCED_UCONTEXT)
// Ten times faster than swapcontext, which asks the kernel for the signal mask at each switch.
struct Stack {
  void* sp = nullptr;
  char* memory = nullptr;
};

extern "C" __attribute__((visibility("hidden"))) void kosmos_switch_stack(void** save, void* to);
asm(R"(
  .text
  .globl kosmos_switch_stack
  .hidden kosmos_switch_stack
  .type kosmos_switch_stack, @function
kosmos_switch_stack:
  push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi); mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx
  ret
  .size kosmos_switch_stack, . - kosmos_switch_stack
)");

inline void prepare(Stack& s, void (*entry)()) {
  if (!s.memory) s.memory = (char*)malloc(STACK_BYTES);
  void** top = (void**)(((uintptr_t)s.memory + STACK_BYTES) & ~(uintptr_t)15);
  *--top = nullptr;       // where entry would return to; also puts the stack where a call would have left it
  *--top = (void*)entry;  // popped by ret
  s.sp = top - 6;         // the six saved registers; their values do not matter
}
inline void switch_stack(Stack& from, Stack& to) { kosmos_switch_stack(&from.sp, to.sp); }
#else
struct Stack {
  ucontext_t context;
  char* memory;
};

inline void prepare(Stack& s, void (*entry)()) {
  if (!s.memory) s.memory = (char*)malloc(STACK_BYTES);
  getcontext(&s.context);
  s.context.uc_stack.ss_sp = s.memory;
  s.context.uc_stack.ss_size = STACK_BYTES;
  s.context.uc_link = nullptr;
  makecontext(&s.context, entry, 0);
}
inline void switch_stack(Stack& from, Stack& to) { swapcontext(&from.context, &to.context); }
#endif
}  // namespace target
