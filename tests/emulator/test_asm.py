"""The reader of assembly text, without running anything."""

from __future__ import annotations

import pytest

from kosmos_raw.emulator import asm
from kosmos_raw.emulator.context import Context
from kosmos_raw.emulator.translate import translate

from .text import TARGET, kernel


@pytest.mark.parametrize(
    "text, kind, first, registers",
    [
        ("v7", "v", 7, 1),
        ("v[2:5]", "v", 2, 4),
        ("a3", "a", 3, 1),
        ("s[0:1]", "s", 0, 2),
        ("vcc", "s", 106, 2),
        ("m0", "s", 124, 1),
    ],
)
def test_registers(text, kind, first, registers):
    op = asm.operand(text)
    assert (op.kind, op.first, op.registers, op.negated, op.absolute) == (kind, first, registers, False, False)


def test_signs_and_constants():
    assert asm.operand("-|v3|").negated and asm.operand("-|v3|").absolute and asm.operand("-|v3|").first == 3
    assert not asm.operand("-3").negated and asm.operand("-3").bits("u32") == 0xFFFFFFFD
    assert asm.operand("-1.0").bits("f32") == 0xBF800000 and asm.operand("-1.0").bits("f16") == 0xBC00
    assert (
        asm.operand("1.0").bits("f64") == 0x3FF0000000000000
        and asm.operand("0x40000000").bits("f64") == 0x4000000000000000
    )
    assert asm.operand("0x12").bits("q64") == 0x12 and asm.operand("-1").bits("q64") == 0xFFFFFFFFFFFFFFFF


def test_instruction_with_modifiers():
    i = asm.instruction(
        3,
        "\tv_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21 "
        "op_sel:[1,0,0] op_sel_hi:[0,1,0] cbsz:1",
    )
    assert i.mnemonic == "v_mfma_scale_f32_16x16x128_f8f6f4" and len(i.operands) == 6 and i.operands[5].first == 21
    assert i.bits("op_sel", 3) == [1, 0, 0] and i.bits("op_sel_hi", 3) == [0, 1, 0] and i.number("cbsz") == 1
    i = asm.instruction(4, "\tbuffer_load_dwordx4 v1, s[8:11], 0 offen offset:16 lds")
    assert (
        [op.text for op in i.operands] == ["v1", "s[8:11]", "0"] and i.number("offset") == 16 and "lds" in i.modifiers
    )
    i = asm.instruction(5, "\tv_mov_b32_dpp v6, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf")
    assert i.form == "dpp" and i.bits("quad_perm", 4) == [1, 0, 3, 2] and i.number("row_mask") == 15
    assert asm.instruction(6, "\tbuffer_wbl2 sc0 sc1").modifiers == {"sc0": "", "sc1": ""}
    assert asm.instruction(7, "\ts_waitcnt vmcnt(3) lgkmcnt(0)").operands[0].text == "vmcnt(3) lgkmcnt(0)"


def test_kernels_labels_and_lines():
    text = (
        TARGET
        + kernel("first", "s_nop 0\n.Lx:\ns_branch .Lx", lds=1024)
        + kernel("second", "v_mov_b32 v1, v0 ; copies")
    )
    program = asm.parse(text)
    first, second = program.kernels
    assert first.labels == {".Lx": 1} and [i.mnemonic for i in first.instructions] == ["s_nop", "s_branch", "s_endpgm"]
    assert first.flag("group_segment_fixed_size") == 1024 and second.instructions[0].text == "v_mov_b32 v1, v0"
    assert program.lines[second.instructions[0].line - 1].strip().startswith("v_mov_b32")


def test_data_is_reachable_from_code():
    table = '\t.section\t.rodata,"a",@progbits\ntable:\n\t.long\t7\n\t.quad\t0x100000002\n'
    body = "s_getpc_b64 s[4:5]\ns_add_u32 s4, s4, table@rel32@lo+4\ns_addc_u32 s5, s5, table@rel32@hi+12"
    source = translate(TARGET + kernel("k", body) + table, "k.s").source
    assert "data_table[] = {7, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0}" in source


# A branch over more than 128 KiB, as clang writes it, back to .Lx and with instructions and labels round it.
FAR = """.Lx:
s_nop 0
s_getpc_b64 s[4:5]
.Lpost_getpc0:
s_add_u32 s4, s4, (.Lx-.Lpost_getpc0)&4294967295
s_addc_u32 s5, s5, (.Lx-.Lpost_getpc0)>>32
s_setpc_b64 s[4:5]
.Ly:
s_nop 1"""


def test_a_far_branch_is_one_branch():
    (k,) = asm.parse(TARGET + kernel("k", FAR)).kernels
    assert [i.text for i in k.instructions] == ["s_nop 0", "s_branch .Lx", "s_nop 1", "s_endpgm"]
    assert k.labels == {".Lx": 0, ".Ly": 2}
    translate(TARGET + kernel("k", FAR), "k.s")


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("s_getpc_b64 s[4:5]\n", "s_getpc_b64 s[6:7]\n"),
        ("s_getpc_b64 s[4:5]\n", "s_mov_b64 s[4:5], s[6:7]\n"),
        (".Lpost_getpc0:\n", ".Lpost_getpc0:\ns_nop 0\n"),
        ("s_getpc_b64 s[4:5]\n.Lpost_getpc0:\n", ".Lpost_getpc0:\ns_getpc_b64 s[4:5]\n"),
        (".Lpost_getpc0:\n", ""),
        ("s_add_u32 s4, s4,", "s_add_u32 s6, s4,"),
        ("s_add_u32 s4, s4,", "s_add_u32 s4, s6,"),
        ("s_add_u32", "s_sub_u32"),
        ("(.Lx-.Lpost_getpc0)&4294967295", "(.Lx-.Lpost_getpc0)&65535"),
        ("(.Lx-.Lpost_getpc0)&4294967295", "(.Ly-.Lpost_getpc0)&4294967295"),
        ("(.Lx-.Lpost_getpc0)&4294967295", "(.Lx-.Ly)&4294967295"),
        ("(.Lx-.Lpost_getpc0)&4294967295", "(.Lx-.Lpost_getpc0+4)&4294967295"),
        ("s_addc_u32 s5, s5,", "s_addc_u32 s6, s5,"),
        ("s_addc_u32 s5, s5,", "s_addc_u32 s5, s6,"),
        ("s_addc_u32", "s_add_u32"),
        (")>>32", ")>>16"),
        ("(.Lx-.Lpost_getpc0)>>32", "(.Ly-.Lpost_getpc0)>>32"),
        ("(.Lx-.Lpost_getpc0)>>32", "(.Lx-.Ly)>>32"),
        ("s_setpc_b64 s[4:5]", "s_setpc_b64 s[6:7]"),
        ("s_setpc_b64", "s_nop 0\ns_setpc_b64"),
    ],
)
def test_other_jumps_to_an_address_are_refused(part, other):
    assert FAR.count(part) == 1
    text = TARGET + kernel("k", FAR.replace(part, other))
    (k,) = asm.parse(text).kernels
    assert "s_setpc_b64" in [i.mnemonic for i in k.instructions]
    with pytest.raises(ValueError, match="s_setpc_b64"):
        translate(text, "k.s")


def test_a_scale_that_is_no_vector_register_is_refused():
    body = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], s4, v21"
    with pytest.raises(ValueError, match="operand s4: a vector register is needed"):
        translate(TARGET + kernel("k", body), "k.s")


def test_accumulation_registers_follow_the_vector_registers():
    k = asm.Kernel("k", {"accum_offset": 32, "next_free_vgpr": 40})
    assert Context(k, {}).vector(asm.operand("a[4:7]"), 4) == 36
    with pytest.raises(asm.Unsupported, match="declares 40"):
        Context(k, {}).vector(asm.operand("a[8:9]"), 2)
