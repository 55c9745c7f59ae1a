/* Streams: what they are given is done as late as possible, when somebody waits for it.

So what was not ordered after it comes before. Work on the default stream and on streams that were not made
to be apart from it waits for each other, as with the driver. While a stream is captured, nothing else may be
asked for that takes part in no graph: allocations, copies, waits. */

#define _GNU_SOURCE
#include "driver.h"
#include <stdlib.h>
#include <string.h>

enum { MOST_STREAMS = 256, MOST_THREADS = 16, NON_BLOCKING = 1, PER_THREAD = 2, FIRST = 4096 };
enum { LAUNCH, COPY, FILL, WAIT };

typedef struct Stream Stream;
typedef struct { int kind, number; void *target, *source; int staged; size_t size; Stream *other; long until; } Work;
typedef struct { Work *work; long count, room; } List;
struct Stream { List list; long first, done; /* of all that it was ever given */ int device, flags, running, captured, gone; };
typedef struct { Stream *stream; long until; int captured; } Event;

static Stream streams[MOST_STREAMS], defaults[DEVICES], per_thread[MOST_THREADS][DEVICES];
static int made, captures, lost, threads;
static __thread int own; /* which of the threads it is, from 1 on */

static Stream *stream_of(void *handle) {
    uintptr_t number = (uintptr_t)handle;
    int device = current_device() < 0 ? 0 : current_device();
    if (number > PER_THREAD) return &streams[number - FIRST];
    if (number == PER_THREAD && !own) own = 1 + threads++ % MOST_THREADS;
    Stream *stream = number == PER_THREAD ? &per_thread[own - 1][device] : &defaults[device];
    stream->device = device;
    return stream;
}

static void append(List *list, Work work) {
    if (list->count == list->room) {
        list->room = list->room ? 2 * list->room : 64;
        list->work = realloc(list->work, list->room * sizeof(Work));
    }
    list->work[list->count++] = work;
}

static long end(Stream *stream) { return stream->first + stream->list.count; }

static int run(Stream *stream, long until) {
    int error = OK;
    if (stream->running) return OK;
    stream->running = 1;
    while (stream->done < until) {
        Work work = stream->list.work[stream->done++ - stream->first]; /* a copy: the list may move */
        int found = OK;
        if (work.kind == WAIT) {
            found = run(work.other, work.until);
        } else if (work.kind == LAUNCH) {
            open_memory();
            found = on_run(work.number) ? BROKEN : OK;
            close_memory();
        } else {
            open_memory();
            if (work.kind == COPY) memmove(work.target, work.source, work.size);
            else memset(work.target, work.number, work.size);
            close_memory();
            if (work.staged) free(work.source);
        }
        error = error ? error : found;
    }
    stream->running = 0;
    if (stream->done == end(stream) && !stream->captured) stream->first = stream->done, stream->list.count = 0;
    return error;
}

static void wait_for(Stream *stream, Stream *other, long until) {
    if (other != stream && other->done < until) append(&stream->list, (Work){WAIT, .other = other, .until = until});
}

/* Work on a stream, behind what it has to wait for. */
static int enqueue(void *handle, Work work) {
    Stream *stream = stream_of(handle), *usual = &defaults[stream->device];
    if (stream->gone) return NO_HANDLE;
    if (captures && !stream->captured && !(stream->flags & NON_BLOCKING)) {
        counts[REFUSALS]++, lost = 1;
        return IMPLICIT;
    }
    if (stream == usual) {
        for (int i = 0; i < made; i++)
            if (streams[i].device == stream->device && !(streams[i].flags & NON_BLOCKING))
                wait_for(stream, &streams[i], end(&streams[i]));
        for (int i = 0; i < MOST_THREADS; i++)
            wait_for(stream, &per_thread[i][stream->device], end(&per_thread[i][stream->device]));
    } else if (!(stream->flags & NON_BLOCKING) && !stream->captured) {
        wait_for(stream, usual, end(usual));
    }
    append(&stream->list, work);
    return OK;
}

int enqueue_copy(void *stream, void *target, const void *source, size_t size, int staged) {
    void *from = (void *)source;
    if (staged) from = memcpy(malloc(size ? size : 1), source, size);
    return enqueue(stream, (Work){COPY, .target = target, .source = from, .size = size, .staged = staged});
}

int enqueue_fill(void *stream, Place place, unsigned char value, size_t size) {
    return enqueue(stream, (Work){FILL, value, .target = (void *)(uintptr_t)place, .size = size});
}

int enqueue_launch(void *stream, void *kernel, const Number *form, void **parameters) {
    if (!on_launch) return OK;
    int number = on_launch(kernel, form, stream_of(stream)->device, parameters);
    return number < 0 ? INVALID : enqueue(stream, (Work){LAUNCH, number});
}

int run_stream(void *handle) { ALONE; return run(stream_of(handle), end(stream_of(handle))); }

int run_all(void) {
    int error = OK;
    for (int i = 0; i < made; i++) if (!error) error = run(&streams[i], end(&streams[i]));
    for (int i = 0; i < DEVICES && !error; i++) {
        error = run(&defaults[i], end(&defaults[i]));
        for (int j = 0; j < MOST_THREADS && !error; j++) error = run(&per_thread[j][i], end(&per_thread[j][i]));
    }
    if (!error) release_memory();
    return error;
}

int capturing(void) {
    ALONE;
    if (captures) counts[REFUSALS]++, lost = 1;
    return captures;
}

/* Streams by name */

int cuStreamCreate(void **handle, Number flags) {
    ALONE;
    if (current_device() < 0) return NO_CONTEXT;
    if (made == MOST_STREAMS) return NO_MEMORY;
    streams[made] = (Stream){.device = current_device(), .flags = flags};
    *handle = (void *)(uintptr_t)(FIRST + made++);
    return OK;
}

int cuStreamCreateWithPriority(void **handle, Number flags, int priority) { return cuStreamCreate(handle, flags); }
int cuStreamDestroy_v2(void *handle) {
    ALONE;
    int error = run_stream(handle);
    stream_of(handle)->gone = 1;
    return error;
}

int cuStreamQuery(void *handle) { return run_stream(handle); }
int cuStreamGetFlags(void *handle, Number *flags) { *flags = stream_of(handle)->flags; return OK; }
int cuStreamGetPriority(void *handle, int *priority) { *priority = 0; return OK; }
int cuStreamGetId(void *handle, uint64_t *number) { *number = (uintptr_t)handle; return OK; }
int cuStreamGetDevice(void *handle, int *device) { *device = stream_of(handle)->device; return OK; }
int cuStreamGetCtx(void *handle, void **context) {
    extern void *context_of(int);
    *context = context_of(stream_of(handle)->device);
    return OK;
}

int cuStreamSynchronize(void *handle) {
    ALONE;
    if (capturing()) return REFUSED;
    counts[WAITS]++;
    return stream_of(handle)->gone ? NO_HANDLE : run_stream(handle);
}

int cuCtxSynchronize(void) {
    ALONE;
    if (capturing()) return REFUSED;
    counts[WAITS]++;
    return run_all();
}

/* Events */

int cuEventCreate(void **event, Number flags) { ALONE; *event = calloc(1, sizeof(Event)); counts[EVENTS]++; return OK; }
int cuEventDestroy_v2(void *event) { free(event); return OK; }

int cuEventRecord(Event *event, void *handle) {
    ALONE;
    Stream *stream = stream_of(handle);
    if (stream->gone) return NO_HANDLE;
    *event = (Event){stream, end(stream), stream->captured};
    return OK;
}

int cuEventRecordWithFlags(Event *event, void *handle, Number flags) { return cuEventRecord(event, handle); }

int cuStreamWaitEvent(void *handle, Event *event, Number flags) {
    ALONE;
    Stream *stream = stream_of(handle);
    if (stream->gone) return NO_HANDLE;
    if (stream->captured != event->captured) {
        counts[REFUSALS]++, lost = 1;
        return APART;
    }
    if (event->stream) wait_for(stream, event->stream, event->until);
    return OK;
}

int cuEventSynchronize(Event *event) {
    ALONE;
    if (capturing()) return REFUSED;
    counts[WAITS]++;
    return event->stream ? run(event->stream, event->until) : OK;
}

int cuEventQuery(Event *event) { ALONE; return event->stream ? run(event->stream, event->until) : OK; }

/* Graphs: the launches of a stream while it is captured */

int cuStreamBeginCapture_v2(void *handle, int mode) {
    ALONE;
    Stream *stream = stream_of(handle);
    if (stream < streams || stream >= streams + MOST_STREAMS || stream->captured) return INVALID;
    int error = run_stream(handle);
    stream->captured = 1, captures++, lost = 0;
    return error;
}

int cuStreamIsCapturing(void *handle, int *status) {
    *status = stream_of(handle)->captured ? 1 + lost : 0;
    return OK;
}

int cuStreamEndCapture(void *handle, void **graph) {
    ALONE;
    Stream *stream = stream_of(handle);
    List *list = calloc(1, sizeof(List));
    *list = stream->list;
    stream->list = (List){0}, stream->done = stream->first, stream->captured = 0, captures--;
    *graph = lost ? NULL : list;
    return lost ? FORGOTTEN : OK;
}

int cuGraphInstantiateWithFlags(void **made_of, void *graph, uint64_t flags) { *made_of = graph; return OK; }
int cuGraphDestroy(void *graph) { return OK; }
int cuGraphExecDestroy(void *graph) { return OK; }

int cuGraphLaunch(List *graph, void *handle) {
    ALONE;
    for (long i = 0; i < graph->count; i++) {
        int error = enqueue(handle, graph->work[i]);
        if (error) return error;
    }
    return OK;
}
