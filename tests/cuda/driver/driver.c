/* A stand-in for the CUDA driver: devices, contexts, modules and launches, as far as numba-cuda asks for them.

It computes nothing: launches are handed to `on_launch`, and run when `on_run` is called with their number. */

#define _GNU_SOURCE
#include "driver.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t shared_state = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
long counts[COUNTERS];
Launched on_launch;
Run on_run;
Moved on_memory;

void stand_in_begin(Launched launched, Run run, Moved moved) { ALONE; on_launch = launched, on_run = run, on_memory = moved; }
void stand_in_forget(void) { ALONE; memset(counts, 0, sizeof counts); }
long stand_in_count(int which) { return counts[which]; }

static int setting(const char *name, int usual) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : usual;
}

/* Devices */

static int devices, version, capability, processors;

int cuInit(Number flags) {
    devices = setting("STAND_IN_DEVICES", 2), version = setting("STAND_IN_DRIVER", 13050);
    capability = setting("STAND_IN_CAPABILITY", 90), processors = setting("STAND_IN_PROCESSORS", 1);
    return devices ? OK : NO_DEVICE;
}

int cuDriverGetVersion(int *number) { *number = setting("STAND_IN_DRIVER", 13050); return OK; }
int cuDeviceGetCount(int *count) { *count = devices; return OK; }
int cuDeviceGet(int *device, int number) { *device = number; return number < devices ? OK : NO_SUCH_DEVICE; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Stand-in %d", device); return OK; }
int cuDeviceGetUuid_v2(char *bytes, int device) { memset(bytes, device + 1, 16); return OK; }
int cuDeviceGetUuid(char *bytes, int device) { return cuDeviceGetUuid_v2(bytes, device); }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = 141ull << 30; return OK; }

static int most_shared(void) { /* bytes of a block, if a kernel asks (CUDA C++ Programming Guide) */
    return (capability == 80 || capability == 87 ? 163 : capability / 10 == 8 || capability >= 120 ? 99 : 227) << 10;
}

int cuDeviceGetAttribute(int *value, int which, int device) {
    static const int known[][2] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, /* block, grid */
        {8, 49152}, {10, 32}, {41, 1}, {115, 1},
    };
    *value = which == 75 ? capability / 10 : which == 76 ? capability % 10 : which == 16 ? processors : which == 97 ? most_shared() : 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) if (known[i][0] == which) *value = known[i][1];
    return OK;
}

int cuDeviceGetDefaultMemPool(void **pool, int device) { *pool = &devices; return OK; }
int cuDeviceGetMemPool(void **pool, int device) { *pool = &devices; return OK; }
int cuMemPoolGetAttribute(void *pool, int which, void *value) { *(uint64_t *)value = 0; return OK; }
int cuMemPoolSetAttribute(void *pool, int which, void *value) { return OK; }

/* Contexts: one for each device, a stack of them for each thread */

typedef struct { int device; } Context;
static Context contexts[DEVICES] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
static __thread Context *stack[64];
static __thread int depth;

int current_device(void) { return depth && stack[depth - 1] ? stack[depth - 1]->device : -1; }
void *context_of(int device) { return &contexts[device]; }

int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuDevicePrimaryCtxReset_v2(int device) { return OK; }
int cuDevicePrimaryCtxSetFlags_v2(int device, Number flags) { return OK; }
int cuDevicePrimaryCtxGetState(int device, Number *flags, int *active) { *flags = 0, *active = 1; return OK; }
int cuCtxGetCurrent(void **context) { *context = depth ? stack[depth - 1] : NULL; return OK; }
int cuCtxSetCurrent(void *context) { stack[depth ? depth - 1 : depth++] = context; return OK; }
int cuCtxPushCurrent_v2(void *context) { stack[depth++] = context; return OK; }
int cuCtxGetApiVersion(void *context, Number *number) { *number = version; return OK; }
int cuCtxGetId(Context *context, uint64_t *number) { *number = context->device + 1; return OK; }
int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return NO_CONTEXT;
    *context = stack[--depth];
    return OK;
}
int cuCtxGetDevice(int *device) {
    *device = current_device();
    return *device < 0 ? NO_CONTEXT : OK;
}

/* Modules and kernels */

/* A kernel is not its function: attributes are taken from either by calls of its own, and launches take both. */
enum { KERNEL, FUNCTION };
typedef struct Kernel Kernel;
typedef struct { int kind; Kernel *kernel; } Function;
struct Kernel {
    Function self, function;
    void *library;
    Number shared[DEVICES]; /* the most dynamic memory of a launch */
    char name[];
};

int cuLibraryLoadData(void **library, const void *code, void *a, void **b, Number c, void *d, void **e, Number f) {
    ALONE;
    if (capturing()) return REFUSED;
    if (memcmp(code, "\177ELF", 4)) return INVALID; /* PTX would be compiled here, which must not be needed */
    *library = malloc(1);
    counts[MODULES]++;
    return OK;
}

int cuLibraryUnload(void *library) { return OK; }
int cuLibraryGetModule(void **module, void *library) { *module = library; return OK; }
int cuLibraryGetGlobal(Place *place, size_t *size, void *library, const char *name) { return NOT_FOUND; }
int cuModuleGetGlobal_v2(Place *place, size_t *size, void *module, const char *name) { return NOT_FOUND; }
int cuLibraryGetKernel(Kernel **kernel, void *library, const char *name) {
    *kernel = malloc(sizeof(Kernel) + strlen(name) + 1);
    (*kernel)->self = (Function){KERNEL, *kernel};
    (*kernel)->function = (Function){FUNCTION, *kernel};
    (*kernel)->library = library;
    for (int i = 0; i < DEVICES; i++) (*kernel)->shared[i] = 48 << 10;
    strcpy((*kernel)->name, name);
    return OK;
}

int cuKernelGetFunction(void **function, Kernel *kernel) { *function = &kernel->function; return OK; }
int cuKernelGetLibrary(void **library, Kernel *kernel) { *library = kernel->library; return OK; }
int cuKernelGetName(const char **name, Kernel *kernel) { *name = kernel->name; return OK; }
int cuKernelSetAttribute(int which, int value, Kernel *kernel, int device) {
    if (kernel->self.kind != KERNEL) return NO_HANDLE;
    if (device < 0 || device >= DEVICES) return NO_SUCH_DEVICE;
    if (which == MAX_DYNAMIC_SHARED && (value < 0 || value > most_shared())) return INVALID;
    if (which == MAX_DYNAMIC_SHARED) kernel->shared[device] = value;
    return OK;
}
int cuKernelGetAttribute(int *value, int which, Kernel *kernel, int device) {
    *value = which ? 0 : 1024;
    return kernel->self.kind == KERNEL ? OK : NO_HANDLE;
}
int cuFuncGetModule(void **module, Function *function) {
    *module = function->kernel->library;
    return function->kind == FUNCTION ? OK : NO_HANDLE;
}
int cuFuncGetAttribute(int *value, int which, Function *function) {
    *value = which ? 0 : 1024;
    return function->kind == FUNCTION ? OK : NO_HANDLE;
}
int cuFuncSetAttribute(Function *function, int which, int value) {
    if (function->kind != FUNCTION) return NO_HANDLE;
    return cuKernelSetAttribute(which, value, function->kernel, current_device());
}

/* Launches */

int cuLaunchKernel(Function *function, Number gx, Number gy, Number gz, Number bx, Number by, Number bz, Number shared,
                   void *stream, void **parameters, void **extra) {
    ALONE;
    Number form[7] = {gx, gy, gz, bx, by, bz, shared};
    Kernel *kernel = function->kernel;
    if (current_device() < 0) return NO_CONTEXT;
    if (!gx || !gy || !gz || !bx || !by || !bz || gy > 65535 || gz > 65535 || gx > 2147483647u) return INVALID;
    if (bx > 1024 || by > 1024 || bz > 64 || (uint64_t)bx * by * bz > 1024 || shared > kernel->shared[current_device()]) return INVALID;
    counts[LAUNCHES]++;
    return enqueue_launch(stream, kernel, form, parameters);
}

typedef struct { Number form[7]; void *stream, *attributes; Number count; } Configuration;

int cuLaunchKernelEx(const Configuration *launch, void *kernel, void **parameters, void **extra) {
    const Number *f = launch->form;
    return cuLaunchKernel(kernel, f[0], f[1], f[2], f[3], f[4], f[5], f[6], launch->stream, parameters, extra);
}

/* Errors, and functions by their names */

int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_STAND_IN"; return OK; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the stand-in"; return OK; }

static int unknown(void) { return UNKNOWN; }

int cuGetProcAddress_v2(const char *name, void **function, int number, uint64_t flags, int *status) {
    static const char *const endings[] = {"_v2", ""};
    static void *self;
    char whole[256];
    Dl_info here;
    if (!self && dladdr((void *)cuInit, &here)) self = dlopen(here.dli_fname, RTLD_NOW);
    *function = NULL;
    for (int i = 0; i < 2 && !*function; i++) {
        snprintf(whole, sizeof whole, "%s%s", name, endings[i]);
        *function = dlsym(self, whole);
    }
    if (!*function) *function = (void *)unknown;
    if (status) *status = 0;
    return OK;
}

int cuGetProcAddress(const char *name, void **function, int number, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, number, flags, NULL);
}
