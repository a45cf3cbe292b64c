"""The types IQ1, IQ2 and IQ3 of GGUF files, whose numbers are points of codebooks.

Such a type stores groups of adjacent numbers as the index of a point of a codebook, and their signs. A point has eight
digits of 3 values (IQ1, IQ2) or four of 8 values (IQ3); the first digit is the lowest of the point's number. The points
are sorted by their numbers, so a codebook is a set: one bit for each number, those of a byte from the lowest on. The
sets are those of ggml (ggml-common.h: iq2xxs_grid, iq2xs_grid, iq2s_grid, iq1s_grid, iq3xxs_grid, iq3s_grid),
compressed by zlib and in base 85.
"""

from __future__ import annotations

import base64
import functools
import zlib

import torch

from parley.model.checkpoint.gguf_bits import BlockParts, pair_nibbles, scale_heads, split_bits, spread_bits

POINT_SETS = {
    "iq2_xxs": (
        "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI!#Zg_{KuzkVd"
        "4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@"
        "@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
    ),
    "iq2_xs": (
        "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-fCU6QVt|)*=>o"
        "J=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1yt"
        "ubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL"
        "~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC"
    ),
    "iq2_s": (
        "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh^u5FBBgC>LAk"
        "BEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$Az"
        "Rb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#"
        "Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(Jyj"
        "C6"
    ),
    "iq1": (
        "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2WdTox*h^v8Vt"
        "nDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!A"
        "jh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}d"
        "P%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}"
        "O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?"
        "+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c"
        "}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&"
        "0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dhe"
        "eu*|v(bMFD;1sQ1"
    ),
    "iq3_xxs": (
        "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)&}FY<X@1m|7IGsjr"
        "X>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%Xv"
        "Hjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5"
    ),
    "iq3_s": (
        "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{OU0lD_x2"
        "OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U"
        "+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;"
        "cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
    ),
}  # fmt: skip
VALUES = {"iq3_xxs": 8, "iq3_s": 8}  # of a digit; others have 3


@functools.cache
def read_codebook(name: str) -> torch.Tensor:
    """Return the points of a codebook, by their index: digits as uint8 [points, 8], or [points, 4] of IQ3."""
    packed = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(POINT_SETS[name]))), dtype=torch.uint8)
    numbers = (packed[:, None] >> torch.arange(8) & 1).flatten().nonzero().flatten()
    base = VALUES.get(name, 3)
    powers = base ** torch.arange(4 if base == 8 else 8)
    return (numbers[:, None] // powers % base).to(torch.uint8)


# Seven signs as eight: the last one makes their number even
EVEN_SIGNS = torch.tensor([signs | signs.bit_count() % 2 << 7 for signs in range(128)], dtype=torch.uint8)
# The codes of the digits -1, 0 and 1 of IQ1 with 0.125 added, then subtracted (BLOCK_NUMBERS of native)
IQ1_CODES = torch.tensor((12, 3, 5, 13, 11, 4), dtype=torch.uint8)


def _read_points(name: str, indices: torch.Tensor) -> torch.Tensor:
    """Return the digits of points: int [blocks, points] -> uint8 [blocks, numbers]."""
    return read_codebook(name).index_select(0, indices.flatten().int()).view(len(indices), -1)


def _read_words(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the words in bytes: int32 [blocks, words]. Words of 16 bits are not negative."""
    words = data.contiguous().view(dtype).int()
    return words & 0xFFFF if dtype == torch.int16 else words


def _odd_scales(scales: torch.Tensor, groups: int) -> torch.Tensor:
    """Return 2 * scale + 1 of each group, as int8 [blocks, groups]. Adjacent groups may share a scale."""
    return (2 * scales + 1).to(torch.int8).repeat_interleave(groups // scales.shape[1], 1)


def _split_sign_words(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the signs and scales in words: four times seven bits of signs, then the scale of 4 bits."""
    signs = words[..., None] >> torch.tensor((0, 7, 14, 21)) & 127
    return EVEN_SIGNS[signs.flatten(1)], words >> 28 & 15


def block_iq2_xxs(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 8 times 4 indices and a word of signs and a scale."""
    words = _read_words(blocks[:, 2:], torch.int32)
    signs, scales = _split_sign_words(words[:, 1::2])
    numbers = _read_points("iq2_xxs", blocks[:, 2:].reshape(-1, 8, 8)[..., :4].flatten(1))
    return numbers | spread_bits(signs) << 3, scale_heads(blocks[:, :2], _odd_scales(scales, 16))


def block_iq2_xs(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 32 times an index of 9 bits and seven signs, 16 scales of 4 bits."""
    words = _read_words(blocks[:, 2:66], torch.int16)
    numbers = _read_points("iq2_xs", words & 511) | spread_bits(EVEN_SIGNS[words >> 9]) << 3
    return numbers, scale_heads(blocks[:, :2], _odd_scales(pair_nibbles(blocks[:, 66:]), 16))


def block_iq2_s(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 32 indices, 256 signs, 2 further bits of each index, 16 scales of 4 bits."""
    high = split_bits(blocks[:, 66:74], 2).mT.flatten(1)
    numbers = _read_points("iq2_s", blocks[:, 2:34].int() | high.int() << 8) | spread_bits(blocks[:, 34:66]) << 3
    return numbers, scale_heads(blocks[:, :2], _odd_scales(pair_nibbles(blocks[:, 74:]), 16))


def block_iq3_xxs(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 64 indices, 8 words of signs and a scale."""
    signs, scales = _split_sign_words(_read_words(blocks[:, 66:], torch.int32))
    numbers = _read_points("iq3_xxs", blocks[:, 2:66]) | spread_bits(signs) << 3
    return numbers, scale_heads(blocks[:, :2], _odd_scales(scales, 8))


def block_iq3_s(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 64 indices, a ninth bit of each, 256 signs, 8 scales of 4 bits."""
    indices = blocks[:, 2:66].int() | spread_bits(blocks[:, 66:74]).int() << 8
    numbers = _read_points("iq3_s", indices) | spread_bits(blocks[:, 74:106]) << 3
    return numbers, scale_heads(blocks[:, :2], _odd_scales(pair_nibbles(blocks[:, 106:]), 8))


def block_iq1_s(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 32 indices, and 8 times 3 further bits of 4 indices, a scale of 3 bits and the sign of what
    is added."""
    words = _read_words(blocks[:, 34:], torch.int16)
    high = (words[..., None] >> torch.tensor((0, 3, 6, 9)) & 7).flatten(1)
    digits = _read_points("iq1", blocks[:, 2:34].int() | high << 8)
    negative = (words >> 15).repeat_interleave(32, 1)
    return IQ1_CODES[digits.int() + 3 * negative], scale_heads(blocks[:, :2], _odd_scales(words >> 12 & 7, 16))


def block_iq1_m(blocks: torch.Tensor) -> BlockParts:
    """32 indices, 3 further bits of each and the sign of what is added, and 4 times 4 scales of 3 bits and 4 bits of
    the scale of the scales."""
    rest = pair_nibbles(blocks[:, 32:48]).int()
    digits = _read_points("iq1", blocks[:, :32].int() | (rest & 7) << 8)
    words = _read_words(blocks[:, 48:], torch.int16)
    scales = (words[..., None] >> torch.tensor((0, 3, 6, 9)) & 7).flatten(1)
    factors = ((words >> 12) << torch.tensor((0, 4, 8, 12))).sum(1, dtype=torch.int32, keepdim=True)
    codes = IQ1_CODES[digits.int() + 3 * (rest >> 3).repeat_interleave(8, 1)]
    return codes, scale_heads(factors.view(torch.uint8)[:, :2], _odd_scales(scales, 16))
