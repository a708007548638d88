"""Writes the ONNX files of this folder, in an environment with scikit-learn and skl2onnx, or tensorflow and tf2onnx.

python make.py sklearn
python make.py keras
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent


def sklearn() -> None:
    """An MLP that has learnt to read digits."""
    import numpy as np
    from skl2onnx import to_onnx
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    images, digits = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    model = MLPClassifier((24,), max_iter=30, random_state=0).fit(images, digits)
    proto = to_onnx(model, images[:1], options={"zipmap": False}, target_opset=18)
    (HERE / "skl_classifier.onnx").write_bytes(proto.SerializeToString())


def keras() -> None:
    """A convolutional and a recurrent network, whose GRU is a loop."""
    import keras
    import tensorflow as tf
    import tf2onnx

    keras.utils.set_random_seed(0)
    layers = keras.layers
    cnn = [
        layers.Conv2D(6, 3, padding="same", activation="relu"),
        layers.BatchNormalization(),
        layers.MaxPooling2D(),
        layers.Conv2D(8, 3, strides=2, padding="same"),
        layers.Flatten(),
        layers.Dense(10),
    ]
    rnn = [layers.LSTM(12, return_sequences=True), layers.GRU(7), layers.LayerNormalization(), layers.Dense(10)]
    for name, shape, parts in (("cnn", (8, 8, 1), cnn), ("rnn", (8, 8), rnn)):
        model = keras.Sequential([keras.Input(shape), *parts])
        function = tf.function(lambda x, model=model: model(x, training=False))
        signature = [tf.TensorSpec((None, *shape), tf.float32, name="x")]
        path = HERE / f"keras_{name}.onnx"
        tf2onnx.convert.from_function(function, input_signature=signature, opset=17, output_path=str(path))


if __name__ == "__main__":
    {"sklearn": sklearn, "keras": keras}[sys.argv[1]]()
