// Loaded before a program with LD_PRELOAD: counts the calls that touch files below a folder, and lets one of them fail.
//
//     faults_arm(folder, at, action, reads)    from the next call on; at = 0 only counts; reads: also those that read
//     faults_count()                    calls so far
//
// action: an error number that the call answers; 0 kills the process before the call; -1 lets a write do half.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static long at, seen;
static int action, reading;

void faults_arm(const char *below, long number, int what, int reads) {
  snprintf(folder, sizeof folder, "%s", below);
  seen = 0, at = number, action = what, reading = reads;
}

long faults_count(void) { return seen; }

// Whether this call fails, with errno set; a call of another folder is not counted.
static int fails(const char *path) {
  if (!folder[0] || strncmp(path, folder, strlen(folder))) return 0;
  if (__atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST) != at) return 0;
  if (action == 0) kill(getpid(), SIGKILL);
  errno = action;
  return 1;
}

static int fails_fd(int fd) {
  char link[64], path[4096];
  if (!folder[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return fails(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_PATH(kind, name, declared, path, ...) \
  kind name declared { return fails(path) ? -1 : REAL(name)(__VA_ARGS__); }
#define ON_FILE(kind, name, declared, ...) \
  kind name declared { return fails_fd(fd) ? -1 : REAL(name)(__VA_ARGS__); }
#define OPENS(name, declared, ...)                                    \
  int name declared {                                                 \
    va_list rest;                                                     \
    va_start(rest, flags);                                            \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                     \
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT)) && !reading)         \
      return REAL(name)(__VA_ARGS__, mode);                           \
    return fails(path) ? -1 : REAL(name)(__VA_ARGS__, mode);          \
  }
// A write with action -1 does half of its work, as on a disk that is almost full.
#define WRITES(name, declared, size, ...)                                                     \
  ssize_t name declared {                                                                     \
    if (!fails_fd(fd)) return REAL(name)(__VA_ARGS__);                                        \
    if (action != -1) return -1;                                                              \
    size_t whole = size;                                                                      \
    size = whole > 1 ? whole / 2 : whole;                                                     \
    return REAL(name)(__VA_ARGS__);                                                           \
  }

OPENS(open, (const char *path, int flags, ...), path, flags)
OPENS(open64, (const char *path, int flags, ...), path, flags)
OPENS(openat, (int dir, const char *path, int flags, ...), dir, path, flags)
OPENS(openat64, (int dir, const char *path, int flags, ...), dir, path, flags)
WRITES(write, (int fd, const void *data, size_t size), size, fd, data, size)
WRITES(pwrite, (int fd, const void *data, size_t size, off_t place), size, fd, data, size, place)
WRITES(pwrite64, (int fd, const void *data, size_t size, off64_t place), size, fd, data, size, place)
WRITES(writev, (int fd, const struct iovec *parts, int count), count, fd, parts, count)
ON_FILE(int, fsync, (int fd), fd)
ON_FILE(int, fdatasync, (int fd), fd)
ON_FILE(int, ftruncate, (int fd, off_t size), fd, size)
ON_FILE(int, ftruncate64, (int fd, off64_t size), fd, size)
ON_FILE(int, fchmod, (int fd, mode_t mode), fd, mode)
ON_FILE(int, flock, (int fd, int how), fd, how)

ssize_t read(int fd, void *data, size_t size) {
  return reading && fails_fd(fd) ? -1 : REAL(read)(fd, data, size);
}

ON_PATH(int, rename, (const char *path, const char *to), path, path, to)
ON_PATH(int, renameat, (int dir, const char *path, int dir2, const char *to), path, dir, path, dir2, to)
ON_PATH(int, unlink, (const char *path), path, path)
ON_PATH(int, unlinkat, (int dir, const char *path, int flags), path, dir, path, flags)
ON_PATH(int, mkdir, (const char *path, mode_t mode), path, path, mode)
ON_PATH(int, rmdir, (const char *path), path, path)
ON_PATH(int, chmod, (const char *path, mode_t mode), path, path, mode)
