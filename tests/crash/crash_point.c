/* Preloaded into a process: counts the calls that change files below one folder. At a chosen one it kills
 * the process (a write is cut in half first, every other call is not made), or from there on calls fail:
 * those that need space, as on a full disk, or all of them, as in a folder that is read-only. It can also
 * show the process a clock that is ahead, and put it back at the chosen call, or keep another folder as the
 * disk would be after a power failure: with what was synchronized, and nothing else. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_length;
static atomic_long calls;
static long last = -1;
static int failure;
static long ahead;
static int clock_only;
static char disk[PATH_MAX];

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Count calls that change files below `path`. At call number `at` (never if it is -1) the process dies,
 * or, if `error` is not 0, this call and the following ones fail with that error number. */
void crash_arm(const char *path, long at, int error) {
    failure = error;
    folder_length = strlen(path);
    memcpy(folder, path, folder_length + 1);
    calls = 0;
    last = at;
}

/* Keep the folder `path` as the disk would be after a power failure. */
void crash_disk(const char *path) { snprintf(disk, sizeof disk, "%s", path); }

long crash_calls(void) { return calls; }

/* Show a clock that is `seconds` ahead. With `returns`, call number `at` of `crash_arm` does not end the
 * process: the clock goes back there. */
void crash_clock(long seconds, int returns) {
    ahead = seconds;
    clock_only = returns;
}

static int later(const char *path, const struct stat *state, int kind, struct FTW *place) {
    (void)kind;
    (void)place;
    struct timespec times[2] = {state->st_atim, state->st_mtim};
    times[1].tv_sec += ahead;
    utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
    return 0;
}

/* Put the clock back. The files so far were written while it was ahead, so they are from the future. */
void crash_clock_back(void) {
    nftw(folder, later, 16, FTW_PHYS);
    ahead = 0;
}

int clock_gettime(clockid_t kind, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);  /* called too often to be looked up each time */
    if (!real) real = REAL(clock_gettime);
    int done = real(kind, now);
    if (kind == CLOCK_REALTIME || kind == CLOCK_REALTIME_COARSE) now->tv_sec += ahead;
    return done;
}
int gettimeofday(struct timeval *now, void *zone) {
    int done = REAL(gettimeofday)(now, zone);
    now->tv_sec += ahead;
    return done;
}
time_t time(time_t *now) {
    time_t found = REAL(time)(NULL) + ahead;
    if (now) *now = found;
    return found;
}

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

/* The place on the disk of a file below the folder; 0 if there is none. */
static int on_disk(const char *path, char *place) {
    if (!disk[0] || path[0] != '/' || !below(path)) return 0;
    return snprintf(place, 2 * PATH_MAX, "%s%s", disk, path + folder_length) > 0;
}

/* A file was synchronized: its content is on the disk. Of a folder, the names of its files are. */
static void synchronized(int file) {
    char link[64], path[PATH_MAX], place[2 * PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    if (!on_disk(path, place)) return;
    struct stat state;
    if (stat(path, &state)) return;
    if (S_ISDIR(state.st_mode)) {
        syscall(SYS_mkdirat, AT_FDCWD, place, 0777);
        DIR *names = opendir(path);
        size_t end = strlen(place);
        for (struct dirent *each; names && (each = readdir(names));) {
            snprintf(place + end, sizeof place - end, "/%s", each->d_name);
            if (each->d_type == DT_REG) close(syscall(SYS_openat, AT_FDCWD, place, O_CREAT | O_WRONLY, 0666));
        }
        if (names) closedir(names);
        return;
    }
    char *name = strrchr(place, '/');  /* a file in a new folder is kept together with the folder */
    *name = 0;
    syscall(SYS_mkdirat, AT_FDCWD, place, 0777);
    *name = '/';
    int from = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY), to = syscall(SYS_openat, AT_FDCWD, place, O_CREAT | O_TRUNC | O_WRONLY, 0666);
    char part[65536];
    ssize_t got;
    while (from >= 0 && to >= 0 && (got = read(from, part, sizeof part)) > 0) syscall(SYS_write, to, part, got);
    if (from >= 0) close(from);
    if (to >= 0) close(to);
}

/* Files that are renamed or removed are so on the disk. */
static void renamed(const char *from, const char *to) {
    char old[2 * PATH_MAX], new[2 * PATH_MAX];
    if (on_disk(from, old) && on_disk(to, new)) syscall(SYS_renameat2, AT_FDCWD, old, AT_FDCWD, new, 0);
}
static void removed(const char *path) {
    char place[2 * PATH_MAX];
    if (on_disk(path, place)) syscall(SYS_unlinkat, AT_FDCWD, place, 0);
}

enum { PROCEED, DIE, FAIL };

static int verdict(int concerned) {
    if (!concerned) return PROCEED;
    long call = atomic_fetch_add(&calls, 1);
    if (last < 0 || call < last) return PROCEED;
    if (failure) return FAIL;
    if (call != last) return PROCEED;
    if (!clock_only) return DIE;
    crash_clock_back();
    return PROCEED;
}

/* Whether calls fail now that need no space, such as opening a file to change it. */
static int read_only(void) { return failure && failure != ENOSPC && last >= 0 && calls > last; }

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* For calls that free space, and for those that need some. */
#define FREES(concerned) \
    do { if (verdict(concerned) == DIE) die(); if ((concerned) && read_only()) { errno = failure; return -1; } } while (0)
#define NEEDS(concerned, failed) \
    do { int end = verdict(concerned); if (end == DIE) die(); if (end == FAIL) { errno = failure; return failed; } } while (0)
/* For writes: half of it is written before the process dies. */
#define WRITES(concerned, half, failed) \
    do { int end = verdict(concerned); if (end == DIE) { half; die(); } if (end == FAIL) { errno = failure; return failed; } } while (0)

ssize_t write(int file, const void *data, size_t size) {
    WRITES(below_file(file), REAL(write)(file, data, size / 2), -1);
    return REAL(write)(file, data, size);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    WRITES(below_file(file), REAL(writev)(file, parts, count / 2), -1);
    return REAL(writev)(file, parts, count);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    WRITES(below_file(file), REAL(pwrite64)(file, data, size / 2, at), -1);
    return REAL(pwrite64)(file, data, size, at);
}
size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    WRITES(below_file(fileno(file)), REAL(fwrite)(data, size, count / 2, file); fflush(file), 0);
    return REAL(fwrite)(data, size, count, file);
}
int fsync(int file) {
    NEEDS(below_file(file), -1);
    int failed = REAL(fsync)(file);
    if (!failed) synchronized(file);
    return failed;
}
int fdatasync(int file) {
    NEEDS(below_file(file), -1);
    int failed = REAL(fdatasync)(file);
    if (!failed) synchronized(file);
    return failed;
}
int ftruncate64(int file, off64_t size) { NEEDS(below_file(file), -1); return REAL(ftruncate64)(file, size); }
int rename(const char *from, const char *to) {
    NEEDS(below(to), -1);
    renamed(from, to);
    return REAL(rename)(from, to);
}
int renameat(int a, const char *from, int b, const char *to) { NEEDS(below(to), -1); return REAL(renameat)(a, from, b, to); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    NEEDS(below(to), -1);
    return REAL(renameat2)(a, from, b, to, flags);
}
int link(const char *from, const char *to) { NEEDS(below(to), -1); return REAL(link)(from, to); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
    NEEDS(below(to), -1);
    return REAL(linkat)(a, from, b, to, flags);
}
int unlink(const char *path) {
    FREES(below(path));
    removed(path);
    return REAL(unlink)(path);
}
int unlinkat(int at, const char *path, int flags) { FREES(below(path) || (at >= 0 && below_file(at))); return REAL(unlinkat)(at, path, flags); }
int rmdir(const char *path) { FREES(below(path)); return REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { NEEDS(below(path), -1); return REAL(mkdir)(path, mode); }

static int opened(const char *name, const char *path, int flags, mode_t mode) {
    NEEDS((flags & (O_CREAT | O_TRUNC)) && below(path), -1);
    if ((flags & O_ACCMODE) != O_RDONLY && read_only() && below(path)) { errno = failure; return -1; }
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
FILE *fopen64(const char *path, const char *mode) { NEEDS(mode[0] != 'r' && below(path), NULL); return REAL(fopen64)(path, mode); }
FILE *fopen(const char *path, const char *mode) { NEEDS(mode[0] != 'r' && below(path), NULL); return REAL(fopen)(path, mode); }
