/* Preloaded into a process: counts the calls that change files below one folder, and kills the process
 * at a chosen one. A write is cut in half first, every other call is not made at all. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_length;
static atomic_long calls;
static long last = -1;

/* Count calls that change files below `path`; die at call number `at`, or never if it is -1. */
void crash_arm(const char *path, long at) {
    folder_length = strlen(path);
    memcpy(folder, path, folder_length + 1);
    calls = 0;
    last = at;
}

long crash_calls(void) { return calls; }

static int below(const char *path) {
    if (!folder_length || !path) return 0;
    if (path[0] == '/') return strncmp(path, folder, folder_length) == 0;
    char here[PATH_MAX];
    return getcwd(here, sizeof here) && strncmp(here, folder, folder_length) == 0;
}

static int below_file(int file) {
    if (!folder_length) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return below(path);
}

static int is_last(int concerned) { return concerned && atomic_fetch_add(&calls, 1) == last; }

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define DIE_IF(concerned) do { if (is_last(concerned)) die(); } while (0)

ssize_t write(int file, const void *data, size_t size) {
    if (is_last(below_file(file))) { REAL(write)(file, data, size / 2); die(); }
    return REAL(write)(file, data, size);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    if (is_last(below_file(file))) { REAL(writev)(file, parts, count / 2); die(); }
    return REAL(writev)(file, parts, count);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    if (is_last(below_file(file))) { REAL(pwrite64)(file, data, size / 2, at); die(); }
    return REAL(pwrite64)(file, data, size, at);
}
size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    if (is_last(below_file(fileno(file)))) { REAL(fwrite)(data, size, count / 2, file); fflush(file); die(); }
    return REAL(fwrite)(data, size, count, file);
}
int fsync(int file) { DIE_IF(below_file(file)); return REAL(fsync)(file); }
int fdatasync(int file) { DIE_IF(below_file(file)); return REAL(fdatasync)(file); }
int ftruncate64(int file, off64_t size) { DIE_IF(below_file(file)); return REAL(ftruncate64)(file, size); }
int rename(const char *from, const char *to) { DIE_IF(below(to)); return REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { DIE_IF(below(to)); return REAL(renameat)(a, from, b, to); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    DIE_IF(below(to));
    return REAL(renameat2)(a, from, b, to, flags);
}
int link(const char *from, const char *to) { DIE_IF(below(to)); return REAL(link)(from, to); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
    DIE_IF(below(to));
    return REAL(linkat)(a, from, b, to, flags);
}
int unlink(const char *path) { DIE_IF(below(path)); return REAL(unlink)(path); }
int unlinkat(int at, const char *path, int flags) { DIE_IF(below(path) || (at >= 0 && below_file(at))); return REAL(unlinkat)(at, path, flags); }
int rmdir(const char *path) { DIE_IF(below(path)); return REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { DIE_IF(below(path)); return REAL(mkdir)(path, mode); }

static int opened(const char *name, const char *path, int flags, mode_t mode) {
    DIE_IF((flags & (O_CREAT | O_TRUNC)) && below(path));
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    return real(path, flags, mode);
}
int open(const char *path, int flags, ...) {
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest);
    return opened("open", path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest);
    return opened("open64", path, flags, mode);
}
FILE *fopen64(const char *path, const char *mode) { DIE_IF(mode[0] != 'r' && below(path)); return REAL(fopen64)(path, mode); }
FILE *fopen(const char *path, const char *mode) { DIE_IF(mode[0] != 'r' && below(path)); return REAL(fopen)(path, mode); }
