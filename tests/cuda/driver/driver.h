/* What the parts of the stand-in for the CUDA driver tell each other. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef unsigned int Number;
typedef uint64_t Place; /* in the memory of a device */

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, NO_SUCH_DEVICE = 101, NO_CONTEXT = 201, NO_HANDLE = 400,
       NOT_FOUND = 500, BROKEN = 700, UNKNOWN = 801, REFUSED = 900, FORGOTTEN = 901, APART = 905, IMPLICIT = 906 };
enum { ALLOCATIONS, FREES, COPIES, WAITS, LAUNCHES, MODULES, EVENTS, REFUSALS, COUNTERS };
enum { DEVICES = 8, MAX_DYNAMIC_SHARED = 8 /* of the attributes of functions */ };

/* Of a launch: kernel, grid, block, dynamic shared memory, device, parameters; its number, by which it is run. */
typedef int (*Launched)(void *, const Number *, int, void **);
typedef int (*Run)(int);                           /* a number of a launch; 0, or an error */
typedef void (*Moved)(int, Place, size_t);         /* device, place, size; 0: it is free */

extern long counts[COUNTERS];
extern Launched on_launch;
extern Run on_run;
extern Moved on_memory;

/* Threads ask at once, as of any driver: what changes or reads what they share does so ALONE, until it returns.
   A thread may hold it and wait for Python's lock, in `on_run`; none waits for it while it holds Python's. */
extern pthread_mutex_t shared_state;
static inline int enter(void) { return pthread_mutex_lock(&shared_state); }
static inline void leave(int *held) { pthread_mutex_unlock(&shared_state); }
#define ALONE __attribute__((cleanup(leave))) int held = enter()

int current_device(void);                          /* -1: there is no context */

/* memory.c: the host can read none of it but between `open_memory` and `close_memory` */
void open_memory(void);
void close_memory(void);
void release_memory(void);                         /* what was given back, once all is done that may use it */
int device_of(Place place);                        /* -1: of none */

/* streams.c: what is done in what order */
int capturing(void);                               /* whether some stream is; then the capture is lost */
int enqueue_copy(void *stream, void *target, const void *source, size_t size, int staged);
int enqueue_fill(void *stream, Place place, unsigned char value, size_t size);
int enqueue_launch(void *stream, void *kernel, const Number *form, void **parameters);
int run_stream(void *stream);
int run_all(void);
