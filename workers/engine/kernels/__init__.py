"""A Llama's layer, compiled for this CPU by numba.

torch runs each of these steps as five to ten operations, of which every one costs some microseconds
to start and a pass over the memory. A kernel costs half a microsecond to call, given the addresses
of contiguous tensors as integers: numba unwraps an integer in nanoseconds, an array in
microseconds.

Every kernel takes the rows one by one or side by side in a vector's lanes: a row has the same bits
in any company. What is worth sharing is shared among threads, which are torch's own.
"""
