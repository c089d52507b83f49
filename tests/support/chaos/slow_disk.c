/* Preloaded into a process, it lets each write to a file take as many microseconds more as the first
   four bytes of the file TOCSIN_SLOW_DISK say at that moment. Sockets and pipes are left alone. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static void slow(int file) {
    static volatile int *more;
    static int none;
    if (more == NULL) {
        const char *path = getenv("TOCSIN_SLOW_DISK");
        int control = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        void *seen = MAP_FAILED;
        if (control >= 0) {
            seen = mmap(NULL, sizeof(int), PROT_READ, MAP_SHARED, control, 0);
            close(control);
        }
        more = seen == MAP_FAILED ? &none : seen;
    }
    struct stat about;
    if (*more > 0 && fstat(file, &about) == 0 && S_ISREG(about.st_mode)) {
        struct timespec pause = {*more / 1000000, *more % 1000000 * 1000L};
        nanosleep(&pause, NULL);
    }
}

#define SLOW(result, name, parameters, file, arguments)                                            \
    result name parameters {                                                                       \
        static result(*real) parameters;                                                           \
        if (real == NULL) real = (result(*) parameters)dlsym(RTLD_NEXT, #name);                     \
        slow(file);                                                                                \
        return real arguments;                                                                     \
    }

SLOW(ssize_t, write, (int file, const void *data, size_t size), file, (file, data, size))
SLOW(ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), file, (file, data, size, at))
SLOW(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at), file, (file, data, size, at))
SLOW(ssize_t, writev, (int file, const struct iovec *parts, int count), file, (file, parts, count))
SLOW(int, fsync, (int file), file, (file))
SLOW(int, fdatasync, (int file), file, (file))
