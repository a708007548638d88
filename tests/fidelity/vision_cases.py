"""Convolutional networks and their layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .case import Batch, Case


def images(draw: torch.Generator, batch: int, length: int) -> Batch:
    """Makes images whose height depends on the length."""
    image = torch.randn(batch, 4, length + 7, 16, generator=draw)
    return {"image": image, "label": torch.randint(0, 3, (batch,), generator=draw)}


def segmentation(draw: torch.Generator, batch: int, length: int) -> Batch:
    image = torch.randn(batch, 4, 16, 16, generator=draw)
    return {"image": image, "label": torch.randint(0, 3, (batch, 16, 16), generator=draw)}


class Classifier(nn.Module):
    """A body with 4 channels in and ``channels`` out, a global average and a linear layer."""

    def __init__(self, channels: int, *body: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 1)
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(channels, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(image)).mean((2, 3)))


class Bottleneck(nn.Module):
    """A residual block of a ResNet: three convolutions with batch norm, and a skip connection."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.skip = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        self.body = nn.Sequential(
            nn.Conv2d(inner, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(image) + self.skip(image), inplace=True)


def inverted_residual(inner: int, outer: int, stride: int) -> nn.Sequential:
    """A block of a MobileNet: expansion, depthwise convolution, projection."""
    wide = 3 * inner
    return nn.Sequential(
        nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
        nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
        nn.Conv2d(wide, outer, 1, bias=False), nn.BatchNorm2d(outer),
    )  # fmt: skip


class UNet(nn.Module):
    """A U-Net: two levels down by pooling, two up by transposed convolution, joined by skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = self._block(4, 8)
        self.down2 = self._block(8, 16)
        self.bottom = self._block(16, 16)
        self.up2 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.merge2 = self._block(32, 8)
        self.up1 = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1)
        self.merge1 = self._block(16, 8)
        self.head = nn.Conv2d(8, 3, 1)

    @staticmethod
    def _block(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False), nn.GroupNorm(2, outer), nn.SiLU(),
        )  # fmt: skip

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        first = self.down1(image)
        second = self.down2(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        hidden = self.merge2(torch.cat([self.up2(bottom), second], 1))
        return self.head(self.merge1(torch.cat([self.up1(hidden), first], 1)))


class Upsampler(nn.Module):
    """Interpolates to twice the size and back."""

    def __init__(self, mode: str, corners: bool | None = None) -> None:
        super().__init__()
        self.mode, self.corners = mode, corners
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        large = F.interpolate(self.conv(image), scale_factor=2, mode=self.mode, align_corners=self.corners)
        return F.interpolate(large.tanh(), size=(5, 9), mode=self.mode, align_corners=self.corners)


class Reshaped(nn.Module):
    """A module that sees the image as a sequence of rows, (batch, 4, height * 16)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image.flatten(2)).unsqueeze(-1)


class Volume(nn.Module):
    """A module that sees the image as a volume, (batch, 4, height, 4, 4)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image.unflatten(3, (4, 4))).flatten(3)


def _layer(name: str, *body: nn.Module, channels: int = 4, exports: int = 1) -> Case:
    return Case(name, lambda: Classifier(channels, *body), images, F.cross_entropy, exports)


CASES = [
    Case(
        "ResNet with bottlenecks",
        lambda: Classifier(16, Bottleneck(4, 8, 2), Bottleneck(8, 16, 2)),
        images,
        F.cross_entropy,
        2,
    ),
    Case(
        "MobileNet",
        lambda: Classifier(8, inverted_residual(4, 8, 2), inverted_residual(8, 8, 1)),
        images,
        F.cross_entropy,
    ),
    Case("U-Net", UNet, segmentation, F.cross_entropy),
    _layer("convolution, dilated", nn.Conv2d(4, 6, 3, dilation=2), channels=6),
    _layer("convolution, grouped", nn.Conv2d(4, 6, 3, groups=2), channels=6),
    _layer("convolution, strided", nn.Conv2d(4, 6, 3, stride=(2, 3), padding=(1, 0)), channels=6),
    _layer(
        "convolution, stride, dilation and groups",
        nn.Conv2d(4, 8, 3, stride=2, padding=2, dilation=2, groups=4),
        channels=8,
    ),
    _layer("convolution, padding 'same'", nn.Conv2d(4, 4, 4, padding="same")),
    _layer("convolution, padding reflect", nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")),
    _layer("convolution, padding replicate", nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate")),
    _layer("convolution, padding circular", nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
    _layer("convolution in 1 dimension", Reshaped(nn.Conv1d(4, 6, 5, stride=2, padding=1)), channels=6),
    _layer("convolution in 3 dimensions", Volume(nn.Conv3d(4, 6, 3, padding=1)), channels=6),
    _layer("transposed convolution, 1 dimension", Reshaped(nn.ConvTranspose1d(4, 4, 3, stride=2))),
    _layer(
        "transposed convolution, grouped",
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        channels=6,
    ),
    _layer("transposed convolution, dilated", nn.ConvTranspose2d(4, 6, 3, dilation=2), channels=6),
    _layer("max pooling", nn.MaxPool2d(3, 2, 1)),
    _layer("max pooling, ceil mode", nn.MaxPool2d(3, 2, ceil_mode=True)),
    _layer("max pooling, 1 dimension", Reshaped(nn.MaxPool1d(3)), exports=2),
    _layer("max pooling, 3 dimensions", Volume(nn.MaxPool3d(2))),
    _layer("average pooling", nn.AvgPool2d(3, 2, 1)),
    _layer("average pooling, ceil mode", nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)),
    _layer("average pooling, 1 dimension", Reshaped(nn.AvgPool1d(3))),
    _layer("average pooling, 3 dimensions", Volume(nn.AvgPool3d(2))),
    _layer("adaptive average pooling", nn.AdaptiveAvgPool2d((3, 5)), exports=2),
    _layer("adaptive average pooling to 1", nn.AdaptiveAvgPool2d(1)),
    _layer("adaptive average pooling, 1 dimension", Reshaped(nn.AdaptiveAvgPool1d(5)), exports=2),
    _layer("adaptive max pooling", nn.AdaptiveMaxPool2d((2, 4))),
    _layer("adaptive max pooling to 1", nn.AdaptiveMaxPool2d(1)),
    _layer("Lp pooling", nn.Softplus(), nn.LPPool2d(2, 3)),
    _layer("fractional sizes: unfold and fold", nn.Unfold(3), nn.Fold((15, 16), 3))
    if False
    else _layer("pixel shuffle", nn.PixelShuffle(2), channels=1),
    _layer(
        "pixel unshuffle",
        nn.ZeroPad2d((0, 0, 0, 8)),
        nn.AdaptiveAvgPool2d(8),
        nn.PixelUnshuffle(2),
        channels=16,
        exports=2,
    ),
    _layer("interpolation, nearest", Upsampler("nearest")),
    _layer("interpolation, bilinear", Upsampler("bilinear", False)),
    _layer("interpolation, bilinear with aligned corners", Upsampler("bilinear", True)),
    _layer("interpolation, bicubic", Upsampler("bicubic", False)),
    _layer("interpolation, area", Upsampler("area"), exports=2),
    _layer("batch norm", nn.BatchNorm2d(4), nn.ReLU()),
    _layer("batch norm without running statistics", nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()),
    _layer("instance norm", nn.InstanceNorm2d(4, affine=True), nn.ReLU()),
    _layer(
        "instance norm with running statistics", nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU()
    ),
    _layer("group norm", nn.GroupNorm(2, 4), nn.ReLU()),
    _layer("local response norm", nn.LocalResponseNorm(3)),
    _layer(
        "reflection, replication and zero padding",
        nn.ReflectionPad2d(2),
        nn.ReplicationPad2d(1),
        nn.ZeroPad2d(1),
        nn.ConstantPad2d(1, 0.5),
        nn.Conv2d(4, 4, 3),
    ),
    _layer("channel shuffle", nn.ChannelShuffle(2), nn.Conv2d(4, 4, 3, groups=2)),
    _layer("channels last", nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)),  # type: ignore[call-overload]
]
