// Who plays: forced interleavings, or threads.
#pragma once
#ifdef KOSMOS_FORCED
#include "history.h"
#else
#include "thread_main.h"
#endif
