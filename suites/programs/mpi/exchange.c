/* Microseconds of half a round trip of 8 bytes between ranks 0 and 1, and of an all-reduce of 8 bytes, in ten rounds. */
#include <mpi.h>
#include <stdio.h>

enum { ROUNDS = 10, EACH = 1000 };

int main(int argc, char **argv) {
    int rank, size;
    double value = 1.0, sum = 0.0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size < 2) return fprintf(stderr, "at least two ranks are needed, there is %d\n", size), MPI_Abort(MPI_COMM_WORLD, 1);
    for (int round = 0; round < ROUNDS; round++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        for (int i = 0; i < EACH && rank < 2; i++) {
            if (rank == 0) MPI_Send(&value, 1, MPI_DOUBLE, 1, 0, MPI_COMM_WORLD);
            MPI_Recv(&value, 1, MPI_DOUBLE, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            if (rank == 1) MPI_Send(&value, 1, MPI_DOUBLE, 0, 0, MPI_COMM_WORLD);
        }
        if (rank == 0) printf("latency: %.3f\n", 1e6 * (MPI_Wtime() - start) / (2.0 * EACH));
        MPI_Barrier(MPI_COMM_WORLD);
        start = MPI_Wtime();
        for (int i = 0; i < EACH; i++) MPI_Allreduce(&value, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        if (rank == 0) printf("all_reduce: %.3f\n", 1e6 * (MPI_Wtime() - start) / EACH);
    }
    MPI_Finalize();
    return 0;
}
