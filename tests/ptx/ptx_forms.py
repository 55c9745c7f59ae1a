"""The instructions that the machine takes, with the modifiers and operands that it computes; no others."""

import re

# Regular expressions, one a line, where dots and braces stand for themselves, `_` and capitals for PARTS.
FORMS = r"""
bra(.uni)? NAME
ret
exit
bar.sync 0
bar.red.(and|or).pred _,0,_
bar.warp.sync _
shfl.sync.(bfly|idx).b32 _(\|_)?,_,_,_,_
vote.sync.any.pred _,_,_

ld.param.ANY _,PARAMETER
ld.(shared|global(.nc)?).(ANY _|v2.ANY {_,_}|v4.ANY {_,_,_,_}),PLACE
st.(shared|global).(ANY PLACE,_|v2.ANY PLACE,{_,_}|v4.ANY PLACE,{_,_,_,_})
atom.global.(add|max|min).INT _,PLACE,_
cp.async.(cg.shared.global PLACE,PLACE,16|ca.shared.global PLACE,PLACE,(4|8|16))(,_)?
cp.async.(commit_group|wait_all)
cp.async.wait_group NUMBER

ldmatrix.sync.aligned.m8n8.x4(.trans)?.shared.b16 {_,_,_,_},PLACE
movmatrix.sync.aligned.m8n8.trans.b16 _,_
mma.sync.aligned.m16n8k16.row.col.f32.(f16.f16|bf16.bf16).f32 {_,_,_,_},{_,_,_,_},{_,_},{_,_,_,_}

mov.(ANY|pred) _,_
mov.[bu](32|64) _,NAME
mov.b(32|64) (_,{_,_}|{_,_},_)
mov.b64 (_,{_,_,_,_}|{_,_,_,_},_)
cvta(.to)?.(global|shared).u64 _,_
selp.ANY _,_,_,_
setp.(eq|ne|lt|le|gt|ge).INT _,_,_
setp.(lo|ls|hi|hs).u(16|32|64) _,_,_
setp.(eq|ne).BITS _,_,_
setp.((eq|ne|lt|le|gt|ge)u?|num|nan).REAL _,_,_

(and|or|xor).(BITS|pred) _,_,_
not.(BITS|pred) _,_
shl.BITS _,_,_
shr.(BITS|INT) _,_,_
bfi.b(32|64) _,_,_,NUMBER,NUMBER
prmt.b32 _,_,_,_
lop3.b32 _,_,_,_,NUMBER

(add|sub|max|min|div|rem).INT _,_,_
(neg|abs).s(16|32|64) _,_
mul.(lo.INT|hi.INT|wide.[su](16|32)) _,_,_
mad.(lo.INT|wide.[su](16|32)) _,_,_,_

(add|sub|mul)(.rn)?.(REAL|f16x2) _,_,_
(max|min).REAL _,_,_
(neg|abs).REAL _,_
copysign.f(32|64) _,_,_
div.rn.f(32|64) _,_,_
fma.(rn.(f16x2|f32|f64)|rm.f32|rz.f32) _,_,_,_
(ex2|lg2|rcp|sqrt).approx(.ftz)?.f32 _,_
(rcp|sqrt).rn.f32 _,_

cvt.[su](8|16|32|64).[su](8|16|32|64) _,_
cvt.r[nzmp]i.[su](8|16|32|64).REAL _,_
cvt.(rn.REAL|rz.f(32|64)).[su](8|16|32|64) _,_
cvt.(f32.f16|f64.f16|f64.f32|f32.bf16) _,_
cvt.(rn.(f16.f32|f16.f64|f32.f64|bf16.f32)|rz.f32.f64) _,_
cvt(.sat)?.f32.f32 _,_
cvt.r[nzmp]i.(f16.f16|f32.f32|f64.f64) _,_
cvt.rn.(f16x2|bf16x2).f32 _,_,_
cvt.rn.f16x2.(e4m3x2|e5m2x2) _,_
"""
NAME, NUMBER = r"[A-Za-z_$][\w$]*", r"\d\w*"
PARTS = {
    "ANY": r"([bus](8|16|32|64)|f(16|32|64))", "INT": r"[su](16|32|64)", "BITS": r"b(16|32|64)",
    "REAL": r"f(16|32|64)", "NAME": NAME, "NUMBER": NUMBER, "PARAMETER": rf"\[{NAME}\]",
    "PLACE": rf"\[(%\w+|{NAME}|{NUMBER})(\+-?\d+)?\]", "_": rf"(_|%[\w.]+|-?{NUMBER})",
}  # fmt: skip
KNOWN = re.compile(
    "|".join(re.sub(r"[A-Z]+|[_.{}]", lambda found: PARTS.get(found[0], "\\" + found[0]), form)
             for form in FORMS.split("\n") if form)
)  # fmt: skip


def known(opcode, operands):
    """Return whether the machine knows an instruction."""
    return KNOWN.fullmatch(f"{opcode} {''.join(operands.split())}".strip()) is not None
