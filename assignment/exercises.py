"""The exercises: which functions are taken out, and which tests grade them."""

from typing import NamedTuple


class Exercise(NamedTuple):
    file: str
    functions: tuple  # their names, a method's after its class: "MLP.forward"
    # {test in test_canon.py: points}. "test_it[gla|mamba2]" means only those cases of test_it that
    # have one of these words as a parameter.
    tests: dict


EXERCISES = {
    1: Exercise(
        "kernels.py",
        ("causal_conv_reference",),
        {
            "test_convolution_by_hand": 2,
            "test_convolution_goes_on_after_a_tail[causal_conv_reference]": 2,
        },
    ),
    2: Exercise(
        "kernels.py",
        ("look_back", "look_ahead", "weight_gradient"),
        {
            "test_convolution_equals_the_definition_in_float64[causal_conv_pytorch]": 2,
            "test_gradients_equal_those_of_the_definition_in_float64[causal_conv_pytorch]": 3,
            "test_convolution_goes_on_after_a_tail[causal_conv]": 1,
        },
    ),
    3: Exercise("canon_gpt.py", ("tail_of_stream",), {"test_a_canon_layer_streams": 3}),
    4: Exercise("canon_gpt.py", ("rotate",), {"test_rotary_multiplies_complex_numbers": 3}),
    5: Exercise(
        "canon_gpt.py",
        ("Attention.forward", "Attention.mask"),
        {"test_attention_is_a_mean_of_values": 6},
    ),
    6: Exercise(
        "canon_gpt.py",
        ("MLP.forward", "Block.forward"),
        {
            "test_canon_points_are_where_the_paper_puts_them": 3,
            "test_models_give_the_same_in_pieces[attention]": 2,
        },
    ),
    7: Exercise(
        "tasks.py",
        ("Depo.instance",),
        {
            "test_depo_by_an_independent_checker": 3,
            "test_depo_order_and_sizes_are_random": 1,
            "test_depo_scores": 1,
        },
    ),
    8: Exercise("canon_gpt.py", ("linear_recurrence",), {"test_recurrence_is_the_formula": 4}),
    9: Exercise(
        "canon_gpt.py",
        ("decayed_products", "run_chunk"),
        {
            "test_chunks_equal_the_loop[gla|mamba2]": 4,
            "test_chunks_are_right_for_any_decay[gla|mamba2]": 3,
        },
    ),
    10: Exercise(
        "canon_gpt.py",
        ("wy_form",),
        {
            "test_chunks_equal_the_loop[gdn|gdn per channel]": 3,
            "test_chunks_are_right_for_any_decay[gdn|gdn per channel]": 2,
        },
    ),
    11: Exercise(
        "tasks.py",
        ("Grammar.chart",),
        {
            "test_lano_chart_equals_enumeration": 3,
            "test_lano_long_sentences_keep_their_probability": 2,
        },
    ),
    12: Exercise(
        "kernels.py",
        ("load_rows", "weighted_sums", "forward_kernel"),
        {"test_convolution_equals_the_definition_in_float64[causal_conv_triton]": 4},
    ),
    13: Exercise(
        "kernels.py",
        ("add_products", "backward_kernel"),
        {"test_gradients_equal_those_of_the_definition_in_float64[causal_conv_triton]": 3},
    ),
}


def is_case_of(key, item):
    """Whether a test that pytest has collected is a case of the one that this key names."""
    name, _, words = key.rstrip("]").partition("[")
    if getattr(item, "originalname", None) != name:
        return False
    parameters = map(str, item.callspec.params.values()) if words else ()
    return not words or not set(words.split("|")).isdisjoint(parameters)
