"""Positions on the device: ALiBi slopes and masks, rotary embedding of sequences of one length."""

import numpy as np

from kvkit.checks import positions as twin


def alibi_slope(*, num_heads, out=None, stream=None):
    """`kvkit.alibi_slope` into an array of a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    num_heads : int
        Query heads.
    out : optional
        An array for the result, of the current device (with the CUDA array interface or DLPack) or of numpy;
        one of numpy is made if not given.
    stream : optional
        The stream to work on: of numba, torch, CuPy or cuda.core, or its address.

    Returns
    -------
    slopes : float32, shape [num_heads]
        The slopes, which are computed on the host.

    Raises
    ------
    DeviceError
        If there is no device.
    KvkitError
        If an argument is wrong; then nothing has been written.

    Examples
    --------
    >>> import kvkit_cuda
    >>> kvkit_cuda.alibi_slope(num_heads=3)
    array([0.0625    , 0.00390625, 0.25      ], dtype=float32)
    """
    from kvkit_cuda.calls import arrays
    from kvkit_cuda.ground import device
    from kvkit_cuda.moves import pieces
    from kvkit_cuda.positions import alibi

    device.require()
    stream = device.stream(stream)
    results = twin.slopes(num_heads)
    ((num_heads,), _) = results.forms["slopes"]
    if out is None:
        return alibi.slopes(num_heads)
    target = arrays.operand("out", out, stream)
    results.given(target.seen)
    slopes = alibi.slopes(num_heads)
    if target.on_device:
        source, row = arrays.Operand(slopes, False, slopes).moved(stream), (1, 1, 1, num_heads)
        pair = source.seen.reshape(row), target.seen.reshape(row)
        pieces.prepare([pair], np.array([[0, 0, 1]]), stream)()
    else:
        target.seen[...] = slopes
    return out


def alibi_mask(seqlen_q, seqlen_kv, attn_mask=None, *, num_heads, data_type="float32", out=None, stream=None):
    """`kvkit.alibi_mask` on a CUDA device: the same arguments, results, checks and bits.

    Parameters
    ----------
    seqlen_q, seqlen_kv : int
        Queries and keys.
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
    mask : shape [num_heads, seqlen_q, seqlen_kv up to a multiple of 16]
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
    >>> kvkit_cuda.alibi_mask(2, 3, num_heads=3)[2, :, :4]
    array([[-0.25,  0.  ,  -inf,  -inf],
           [-0.5 , -0.25,  0.  ,  -inf]], dtype=float32)
    """
    from kvkit_cuda.calls import arrays, positions
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    seqlens = arrays.host("seqlen_q", seqlen_q, stream), arrays.host("seqlen_kv", seqlen_kv, stream)

    def checked(mask):
        return twin.static_alibi(*seqlens, mask, num_heads=num_heads, data_type=data_type)

    return positions.mask(checked, attn_mask, out, stream)


def rotary_position_embedding(
    query,
    key,
    start_pos,
    pad_len=None,
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
    """`kvkit.rotary_position_embedding` on a CUDA device: the same arguments, results and checks.

    Its products and sums are the twin's, bit for bit; cosines and sines too, but for rare ones that lie
    halfway between neighbours.

    Parameters
    ----------
    query, key, out
        As the twin has them, each an array of the current device (with the CUDA array interface or DLPack;
        used where it is) or of numpy (copied to the device, and back if it changes).
    start_pos, pad_len
        As the twin has them. They are best on the host, where they are checked: the call waits for those that
        are on the device.
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
    >>> tokens = np.ones((1, 2, 1, 4), np.float32)
    >>> query, key = kvkit_cuda.rotary_position_embedding(tokens, tokens, 1, rotary_dim=2)
    >>> query[0, :, 0].round(3)
    array([[-0.301,  1.382,  1.   ,  1.   ],
           [-1.325,  0.493,  1.   ,  1.   ]], dtype=float32)
    """
    from kvkit_cuda.calls import arrays, positions
    from kvkit_cuda.ground import device

    device.require()
    stream = device.stream(stream)
    steps = arrays.host("start_pos", start_pos, stream), arrays.host("pad_len", pad_len, stream)

    def checked(query, key):
        return twin.static_turn(
            query,
            key,
            *steps,
            rotary_dim=rotary_dim,
            theta=theta,
            bypass_key=bypass_key,
            max_position_embeddings=max_position_embeddings,
            scaling_type=scaling_type,
            scaling_factor=scaling_factor,
        )

    return positions.rotate(checked, query, key, out, stream)
