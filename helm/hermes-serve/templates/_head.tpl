{{/* The head: Ray's GCS, its dashboard, Serve's controller. With autoscaling it asks the Kubernetes API for pods. */}}
{{- define "hermes.headTemplate" -}}
{{- $pod := dict "root" . "component" "head" "group" .Values.head -}}
metadata:
  labels:
    {{- include "hermes.component" (list . "head") | nindent 4 }}
  {{- with .Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ .Release.Name }}-head
  automountServiceAccountToken: {{ not (empty .Values.settings.workers.autoscaling) }}
  enableServiceLinks: false
  {{- include "hermes.pullSecrets" . | nindent 2 }}
  {{- include "hermes.podSecurity" 10001 | nindent 2 }}
  {{- include "hermes.scheduling" .Values.head.scheduling | nindent 2 }}
  containers:
    - name: ray-head
      image: {{ include "hermes.rayImage" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- include "hermes.containerSecurity" . | nindent 6 }}
      env:
        {{- include "hermes.rayEnvironment" . | nindent 8 }}
      ports: # KubeRay makes Services of them, by these names
        - name: gcs-server
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        - name: serve
          containerPort: 8000
        - name: metrics
          containerPort: 8080
        - name: agent
          containerPort: 52365
        - name: as-metrics
          containerPort: 44217
        - name: dash-metrics
          containerPort: 44227
      {{- include "hermes.resources" (dict "root" . "cpus" .Values.head.cpus "memory" .Values.head.memory) | nindent 6 }}
      {{- include "hermes.rayletProbes" . | nindent 6 }}
      readinessProbe:
        httpGet: {path: /api/gcs_healthz, port: dashboard}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 6
      volumeMounts:
        {{- include "hermes.rayMounts" $pod | nindent 8 }}
  volumes:
    {{- include "hermes.rayVolumes" $pod | nindent 4 }}
{{- end }}
