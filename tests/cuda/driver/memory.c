/* Memory of devices: each allocation ends at a page that nobody may use, and the host can read none of it. */

#define _GNU_SOURCE
#include "driver.h"
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 65536, ALIGNMENT = 256, POISON = 0xFF };
typedef struct { Place place; size_t size, mapped; char *base; int device, given_back; } Block;

static Block blocks[MOST];
static int used, opened;
static size_t page;

static void protect(Block *block, int how) { mprotect(block->base + page, block->mapped - 2 * page, how); }

void open_memory(void) {
    if (!opened++) for (int i = 0; i < used; i++) protect(&blocks[i], PROT_READ | PROT_WRITE);
}

void close_memory(void) {
    if (!--opened) for (int i = 0; i < used; i++) protect(&blocks[i], PROT_NONE);
}

static Block *block_of(Place place) {
    for (int i = 0; i < used; i++)
        if (place >= blocks[i].place && place < blocks[i].place + blocks[i].size) return &blocks[i];
    return NULL;
}

int device_of(Place place) {
    ALONE;
    Block *block = block_of(place);
    return block ? block->device : -1;
}

int cuMemAlloc_v2(Place *place, size_t size) {
    ALONE;
    if (capturing()) return REFUSED;
    if (!size) return INVALID;
    if (current_device() < 0) return NO_CONTEXT;
    if (used == MOST) return NO_MEMORY;
    page = sysconf(_SC_PAGESIZE);
    size_t whole = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, inner = (whole + page - 1) / page * page;
    Block block = {.size = size, .mapped = inner + 2 * page, .device = current_device()};
    block.base = mmap(NULL, block.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block.base == MAP_FAILED) return NO_MEMORY;
    block.place = (Place)(uintptr_t)(block.base + page + inner - whole);
    protect(&block, PROT_READ | PROT_WRITE);
    memset((void *)(uintptr_t)block.place, POISON, whole);
    if (!opened) protect(&block, PROT_NONE);
    blocks[used++] = block;
    *place = block.place;
    counts[ALLOCATIONS]++;
    if (on_memory) on_memory(block.device, *place, size);
    return OK;
}

int cuMemFree_v2(Place place) {
    ALONE;
    Block *block = block_of(place);
    if (capturing()) return REFUSED;
    if (!place) return OK;
    if (!block || block->place != place) return INVALID;
    if (block->given_back) return INVALID;
    block->given_back = 1;
    counts[FREES]++;
    return OK;
}

void release_memory(void) {
    for (int i = used - 1; i >= 0; i--) {
        if (!blocks[i].given_back) continue;
        if (on_memory) on_memory(blocks[i].device, blocks[i].place, 0);
        munmap(blocks[i].base, blocks[i].mapped);
        blocks[i] = blocks[--used];
    }
}

int cuMemGetInfo_v2(size_t *unused, size_t *total) {
    *total = 141ull << 30, *unused = 100ull << 30;
    return OK;
}

int cuMemGetAddressRange_v2(Place *place, size_t *size, Place inside) {
    ALONE;
    Block *block = block_of(inside);
    if (!block) return INVALID;
    if (place) *place = block->place;
    if (size) *size = block->size;
    return OK;
}

int cuPointerGetAttribute(void *value, int which, Place place) {
    ALONE;
    enum { CONTEXT = 1, KIND, DEVICE_POINTER, HOST_POINTER, SYNC = 6, MANAGED = 8, ORDINAL, ON_DEVICE = 2 };
    extern void *context_of(int);
    Block *block = block_of(place);
    if (!block) return INVALID;
    switch (which) {
    case CONTEXT: *(void **)value = context_of(block->device); break;
    case KIND: *(Number *)value = ON_DEVICE; break;
    case DEVICE_POINTER: *(Place *)value = place; break;
    case ORDINAL: *(int *)value = block->device; break;
    case SYNC: case MANAGED: *(Number *)value = 0; break;
    default: return INVALID;
    }
    return OK;
}

int cuPointerGetAttributes(Number count, int *which, void **values, Place place) {
    for (Number i = 0; i < count; i++)
        if (cuPointerGetAttribute(values[i], which[i], place)) *(Place *)values[i] = 0;
    return OK;
}

/* Copies */

static int copied(void *stream, void *target, const void *source, size_t size, int staged) {
    ALONE;
    if (capturing()) return REFUSED;
    counts[COPIES]++;
    return enqueue_copy(stream, target, source, size, staged);
}

static void *there(Place place) { return (void *)(uintptr_t)place; }

int cuMemcpyHtoDAsync_v2(Place target, const void *source, size_t size, void *stream) {
    return copied(stream, there(target), source, size, 1);
}

int cuMemcpyHtoD_v2(Place target, const void *source, size_t size) {
    int error = cuMemcpyHtoDAsync_v2(target, source, size, NULL);
    return error ? error : run_stream(NULL);
}

int cuMemcpyDtoHAsync_v2(void *target, Place source, size_t size, void *stream) {
    int error = copied(stream, target, there(source), size, 0);
    return error ? error : run_stream(stream); /* as for all memory that is not pinned */
}

int cuMemcpyDtoH_v2(void *target, Place source, size_t size) {
    return cuMemcpyDtoHAsync_v2(target, source, size, NULL);
}

int cuMemcpyDtoDAsync_v2(Place target, Place source, size_t size, void *stream) {
    return copied(stream, there(target), there(source), size, 0);
}

int cuMemcpyDtoD_v2(Place target, Place source, size_t size) {
    return cuMemcpyDtoDAsync_v2(target, source, size, NULL);
}

int cuMemsetD8Async(Place place, unsigned char value, size_t size, void *stream) {
    ALONE;
    if (capturing()) return REFUSED;
    counts[COPIES]++;
    return enqueue_fill(stream, place, value, size);
}

int cuMemsetD8_v2(Place place, unsigned char value, size_t size) {
    return cuMemsetD8Async(place, value, size, NULL);
}
