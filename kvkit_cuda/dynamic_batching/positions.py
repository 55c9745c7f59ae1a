"""Positions of packed sequences on the device: their indices, ALiBi masks, rotary embedding."""

import numpy as np

from kvkit.checks import positions as twin


def position_index(sequences, seqstarts, start_pos, max_seqlen=None, *, out=None, stream=None):
    """The twin of that name in `kvkit` on a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    sequences, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied back if it changes). The elements of `sequences` are not read.
    seqstarts, start_pos
        As the twin has them. They are best on the host, where they are checked: the call waits for those that
        are on the device.
    max_seqlen : int or None
        At least the longest sequence. It changes no result.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    positions : int64, shape [seqstarts[B]]
        `out`, or a new array where ``sequences`` is: numpy's, torch's, CuPy's or else numba's.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has been written.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> tokens = np.array([7, 7, 7, 9])
    >>> kvkit_cuda.dynamic_batching.position_index(tokens, [0, 3, 4], [0, 10])
    array([ 0,  1,  2, 10])
    """
    from kvkit_cuda.calls import arrays, positions, results
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    here = arrays.operand("sequences", sequences, stream)
    seen = np.broadcast_to(np.zeros((), here.seen.dtype), here.seen.shape) if here.on_device else here.seen
    call = twin.position_index(
        seen,
        arrays.host("seqstarts", seqstarts, stream),
        arrays.host("start_pos", start_pos, stream),
        max_seqlen,
    )
    made, returned = results.outputs(out, call.results, (sequences, here), stream)
    copy = made[0].moved(stream, contents=False)
    positions.index(call.starts, call.first, copy.seen, stream)
    made[0].take(copy, stream)
    return returned


def alibi_mask(seqstarts, kvstarts, attn_mask=None, *, num_heads, data_type="float32", out=None, stream=None):
    """The twin of that name in `kvkit` on a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    seqstarts, kvstarts
        As the twin has them. They are best on the host, where they are checked: the call waits for those that
        are on the device.
    attn_mask, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    num_heads, data_type
        As the twin has them.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    mask : shape [num_heads, seqstarts[B], kvstarts[B] up to a multiple of 16]
        `out`, or a new array where ``attn_mask`` is: numpy's, torch's, CuPy's or else numba's; numpy's
        without one.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has been written.

    Examples
    --------
    >>> import kvkit_cuda
    >>> kvkit_cuda.dynamic_batching.alibi_mask([0, 1, 3], [0, 2, 4], num_heads=3)[2, :, :5]
    array([[-0.25,  0.  ,  0.  ,  0.  ,  0.  ],
           [ 0.  ,  0.  ,  0.  ,  -inf,  0.  ],
           [ 0.  ,  0.  , -0.25,  0.  ,  0.  ]], dtype=float32)
    """
    from kvkit_cuda.calls import arrays, positions
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    starts = arrays.host("seqstarts", seqstarts, stream), arrays.host("kvstarts", kvstarts, stream)

    def checked(mask):
        return twin.dynamic_alibi(*starts, mask, num_heads=num_heads, data_type=data_type)

    return positions.mask(checked, attn_mask, out, stream)


def rotary_position_embedding(
    query,
    key,
    seqstarts,
    start_pos,
    max_seqlen,
    *,
    rotary_dim=0,
    theta=10000.0,
    bypass_key=False,
    max_position_embeddings=2048,
    scaling_type="",
    scaling_factor=1.0,
    out=None,
    stream=None,
):
    """The twin of that name in `kvkit` on a CUDA device: the same arguments, results and checks.

    Its products and sums are the twin's, bit for bit; cosines and sines too, but for rare ones that lie
    halfway between neighbours.

    Parameters
    ----------
    query, key, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    seqstarts, start_pos
        As the twin has them. They are best on the host, where they are checked: the call waits for those that
        are on the device.
    max_seqlen : int or None
        At least the longest sequence. It changes no result.
    rotary_dim, theta, bypass_key, max_position_embeddings, scaling_type, scaling_factor
        As the twin has them. Where an angle reaches 2^24, all of the call's cosines and sines are computed on
        the host.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address. The call does not wait for
        it, unless arrays are copied.

    Returns
    -------
    query, key
        `out`, or new arrays where ``query`` is: numpy's, torch's, CuPy's or else numba's.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has been written.

    Examples
    --------
    >>> import numpy as np, kvkit_cuda
    >>> tokens, attend = np.ones((3, 1, 2), np.float32), kvkit_cuda.dynamic_batching
    >>> query, key = attend.rotary_position_embedding(tokens, tokens, [0, 1, 3], [2, 1], None)
    >>> query[:, 0].round(3)
    array([[-1.325,  0.493],
           [-0.301,  1.382],
           [-1.325,  0.493]], dtype=float32)
    """
    from kvkit_cuda.calls import arrays, positions
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    starts = arrays.host("seqstarts", seqstarts, stream), arrays.host("start_pos", start_pos, stream)

    def checked(query, key):
        return twin.dynamic_turn(
            query,
            key,
            *starts,
            max_seqlen,
            rotary_dim=rotary_dim,
            theta=theta,
            bypass_key=bypass_key,
            max_position_embeddings=max_position_embeddings,
            scaling_type=scaling_type,
            scaling_factor=scaling_factor,
        )

    return positions.rotate(checked, query, key, out, stream)
