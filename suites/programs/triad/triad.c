/* a = b + s * c over arrays that no cache holds: bandwidth of each repetition in MB/s, and whether the result is right. */
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    const long n = 16L << 20; /* three arrays of 128 MiB */
    const int repetitions = argc > 1 ? atoi(argv[1]) : 10;
    double *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *b), *c = malloc(n * sizeof *c);
    if (!a || !b || !c) return fprintf(stderr, "no memory for %ld values\n", 3 * n), 1;
#pragma omp parallel for
    for (long i = 0; i < n; i++) a[i] = 0.0, b[i] = 2.0, c[i] = 0.5;
    for (int r = 0; r < repetitions; r++) {
        const double start = omp_get_wtime();
#pragma omp parallel for
        for (long i = 0; i < n; i++) a[i] = b[i] + 3.0 * c[i];
        printf("Triad: %.1f\n", 3e-6 * n * sizeof *a / (omp_get_wtime() - start));
    }
    for (long i = 0; i < n; i++)
        if (fabs(a[i] - 3.5) > 1e-12) return fprintf(stderr, "a[%ld] is %g\n", i, a[i]), 1;
    puts("Solution Validates");
    return 0;
}
