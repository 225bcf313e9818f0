"""The exercises: which functions they ask for, and which tests grade them."""

# What the students' copy has, besides the handout. The other files hold solutions, or answers.
COPIED = """
    kernels.py canon_gpt.py tasks.py train.py sample.py plot.py test_canon.py conftest.py
    examples/longer.py examples/retention.py examples/sets.py
    assignment/exercises.py assignment/grade.py
    requirements.txt .gitignore LICENSE
""".split()

# {exercise: (file, functions ..)}. A method comes after its class.
FUNCTIONS = {
    1: ("kernels.py", "causal_conv_reference"),
    2: ("kernels.py", "look_back", "look_ahead", "weight_gradient"),
    3: ("canon_gpt.py", "exchange_tail"),
    4: ("canon_gpt.py", "rotate"),
    5: ("canon_gpt.py", "Attention.forward", "Attention.mask"),
    6: ("canon_gpt.py", "MLP.forward", "Block.forward"),
    7: ("tasks.py", "Depo.instance"),
    8: ("canon_gpt.py", "linear_recurrence"),
    9: ("canon_gpt.py", "decayed_products", "run_chunk"),
    10: ("canon_gpt.py", "wy_form"),
    11: ("tasks.py", "Grammar.chart"),
    12: ("kernels.py", "load_rows", "weighted_sums", "forward_kernel", "gated_forward_kernel"),
    # gated_forward_kernel is in both, because it holds the solution of 12 as well.
    13: ("kernels.py", "add_products", "backward_kernel")
    + ("gated_forward_kernel", "gated_backward_kernel"),
}

# (exercise, points, test in test_canon.py). "test_it[gla|mamba2]" means only those cases of test_it
# that have one of these words as a parameter.
TESTS = [
    (1, 2, "test_convolution_by_hand"),
    (1, 2, "test_convolution_goes_on_after_a_tail[causal_conv_reference]"),
    (2, 2, "test_convolution_equals_the_definition_in_float64[causal_conv_pytorch]"),
    (2, 3, "test_gradients_equal_those_of_the_definition_in_float64[causal_conv_pytorch]"),
    (2, 1, "test_convolution_goes_on_after_a_tail[causal_conv]"),
    (3, 3, "test_a_canon_layer_streams"),
    (4, 3, "test_rotary_multiplies_complex_numbers"),
    (5, 6, "test_attention_is_a_mean_of_values"),
    (6, 3, "test_canon_points_are_where_the_paper_puts_them"),
    (6, 2, "test_models_give_the_same_in_pieces[attention]"),
    (7, 3, "test_depo_by_an_independent_checker"),
    (7, 1, "test_depo_order_and_sizes_are_random"),
    (7, 1, "test_depo_scores"),
    (8, 4, "test_recurrence_is_the_formula"),
    (9, 4, "test_chunks_equal_the_loop[gla|mamba2]"),
    (9, 3, "test_chunks_are_right_for_any_decay[gla|mamba2]"),
    (10, 3, "test_chunks_equal_the_loop[gdn|gdn per channel]"),
    (10, 2, "test_chunks_are_right_for_any_decay[gdn|gdn per channel]"),
    (11, 3, "test_lano_chart_equals_enumeration"),
    (11, 2, "test_lano_long_sentences_keep_their_probability"),
    (12, 4, "test_convolution_equals_the_definition_in_float64[causal_conv_triton]"),
    (13, 2, "test_gradients_equal_those_of_the_definition_in_float64[causal_conv_triton]"),
    (13, 1, "test_gradients_equal_those_of_the_definition_in_float64[causal_conv_gated_triton]"),
]


def is_case_of(test, item):
    """Whether a test that pytest has collected is a case of a test of this table."""
    name, _, words = test.rstrip("]").partition("[")
    if getattr(item, "originalname", None) != name:
        return False
    parameters = map(str, item.callspec.params.values()) if words else ()
    return not words or not set(words.split("|")).isdisjoint(parameters)
